"""Above the chapters: a bound, from the options alone, for what a step needs beside weights and pool.

What a step makes and lets go grows with the tokens and sequences of a step and with the longest context. It
does not grow with the pool, nor with the number of layers: a layer's results are let go before the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minivllm.decoding.sampler import MAX_DRAWN, MAX_SORTED
from minivllm.kernels.torch_paged import MAX_GATHERED, MAX_SCORES, TILE
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.size import bytes_per_token

if TYPE_CHECKING:
    from minivllm.engine_args import EngineArgs
    from minivllm.model.decoder import Decoder

WIDE = 4  # bytes: norms and kernels compute in float32 at least
COPIES = 4  # of a row of numbers: what an operation reads, what it makes, and what waits for the next one
DRAWN = 3  # arrays of 8 bytes of the rows drawn at a time: their logits, weights, and pairs to select from
SORTED = 10  # of the rows sorted at a time: float64 probabilities, their order, cuts, sums
SEARCH = 3  # float64 arrays of the rows of all beams: logits, log-probabilities, and their sums
LEFT_BY_A_THREAD = 2**20  # bytes: eight tiles of the kernel in C, 64 rows of 258 numbers each, and their list


def workspace_bytes(model: Decoder, args: EngineArgs) -> int:
    """Most bytes that a step needs beside weights and pool: the sum of `workspace_parts`.

    A sum, though one part is let go before the next comes: memory that was given back may stay resident. args
    need not be resolved. Raises InvalidOption.
    """
    return sum(workspace_parts(model, args).values())


def workspace_parts(model: Decoder, args: EngineArgs) -> dict[str, int]:
    """The bound by what the memory is for, in bytes. T: most tokens in a step; S: max_num_seqs; L: tokens of
    the longest sequence, max_model_len or what the pool holds.

        batch        a few whole numbers for each of the T tokens, and S block tables
        activations  COPIES x T x the widest rows of a layer: hidden, queries, keys, values, the MLP's inner
        attention    what the kernels of args.attention make, by `_attention`
        logits       S x vocab_size, in the model's dtype twice, and twice in float32 at least: what penalties
                     made of them, and of that the rows that are not greedy; beside that DRAWN or SORTED
                     arrays of the rows that are taken at a time, or a SEARCH's of all beams

    At T = 512 tokens of SmolLM2-135M (hidden 576, inner 1536, 9 + 3 + 3 heads of 64) in float32 the
    activations are 4 x 512 x (2 x 576 + 960 + 1536) x 4 bytes = 28.5 MiB.
    """
    args = args.resolve(model)
    config, itemsize = model.config, model.dtype.itemsize
    num_seqs, num_tokens, longest = args.max_num_seqs, *_extent(model, args)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    rows = 2 * config.hidden_size + heads * config.head_dim + config.intermediate_size
    drawn, ranked = (min(num_seqs, max(1, n // config.vocab_size)) for n in (MAX_DRAWN, MAX_SORTED))
    rows_chosen = max(DRAWN * drawn, SORTED * ranked, SEARCH * num_seqs)
    tables = num_blocks_for(longest, args.block_size or 1) * num_seqs
    return {
        "batch": 8 * (8 * num_tokens + 2 * tables),
        "activations": COPIES * num_tokens * rows * max(WIDE, itemsize),
        "attention": _attention(model, args, num_tokens, longest),
        "logits": config.vocab_size * (num_seqs * 2 * (itemsize + max(WIDE, itemsize)) + 8 * rows_chosen),
    }


def _extent(model: Decoder, args: EngineArgs) -> tuple[int, int]:
    """(most tokens in a step, most tokens of a sequence)."""
    slots = int(args.kv_cache_memory_bytes or 0) // bytes_per_token(model)
    longest = min(int(args.max_model_len or 0), slots)
    whole = min(args.max_num_seqs * longest, slots)
    return min(args.max_num_batched_tokens or whole, whole), longest


def _attention(model: Decoder, args: EngineArgs, num_tokens: int, longest: int) -> int:
    """By the name of the kernels; queries and results come on top.

    reference, and memory that is not paged: one sequence at a time: its keys and values twice, as blocks and
    in a row, and three times the scores of its queries, [num_heads, queries, L], with their mask.
    torch: keys and values of one group, or of one sequence, as they are and converted; scores twice; which
    slots are unfilled, of all groups. Its sizes are limits of `kernels/torch_paged.py`.
    c, triton: no scores stand in memory; what threads leave of keys that they have shared out.
    """
    config, itemsize = model.config, model.dtype.itemsize
    wide, heads = max(WIDE, itemsize), config.num_attention_heads
    kv_row = 2 * config.num_key_value_heads * config.head_dim  # of keys and values
    rows = 3 * num_tokens * heads * config.head_dim * wide
    if args.attention in (None, "reference"):
        scores = min(num_tokens, longest) * longest * (3 * heads * wide + 2)
        return rows + 2 * longest * kv_row * itemsize + scores
    if args.attention == "torch":
        padded = num_blocks_for(longest, args.block_size or 1) * (args.block_size or 1)
        gathered = max(MAX_GATHERED, padded)
        scores = max(min(MAX_SCORES, TILE * heads * padded), gathered * heads)
        unfilled = 10 * args.max_num_seqs * padded  # a bool and an int64 each, and one byte on the way
        return rows + gathered * kv_row * (itemsize + wide) + 2 * scores * wide + unfilled
    return rows + LEFT_BY_A_THREAD * torch.get_num_threads()
