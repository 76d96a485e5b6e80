"""Chapter 0: logits changed before a token is chosen: bias, penalties, and tokens that may not come yet.

In vLLM's order: tokens that would end the text too early are ruled out, bias is added, then penalties by
what prompt and output have already. Only rows that ask for something are touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.decoding.stopping import stop_token_ids
from minivllm.params import SamplingParams


def adjust(
    logits: Tensor,
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    eos_token_ids: Sequence[int],
) -> Tensor:
    """The logits [num_seqs, vocab_size] as the params of each row want them; logits stay as they are.

    prompts, outputs: each row's token ids so far. float32 at least, since a penalty on half precision
    rounds.
    """
    changed = [i for i, p in enumerate(params) if _changes(p, len(outputs[i]))]
    if not changed:
        return logits
    logits = logits.clone() if logits.dtype == torch.float64 else logits.to(torch.float32, copy=True)
    for i in changed:
        _adjust_row(logits[i], params[i], prompts[i], outputs[i], eos_token_ids)
    return logits


def _changes(p: SamplingParams, num_output: int) -> bool:
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
    return bool(num_output < p.min_tokens or p.logit_bias or penalties)


def _adjust_row(
    row: Tensor, p: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos_token_ids: Sequence[int]
) -> None:
    def ids(tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=row.device)

    def numbers(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=row.dtype, device=row.device)

    if len(output) < p.min_tokens:
        row[ids(stop_token_ids(p, eos_token_ids))] = float("-inf")
    if p.logit_bias:
        row[ids(list(p.logit_bias))] += numbers(list(p.logit_bias.values()))
    if p.repetition_penalty != 1:
        seen = ids(sorted({*prompt, *output}))
        row[seen] = torch.where(
            row[seen] > 0, row[seen] / p.repetition_penalty, row[seen] * p.repetition_penalty
        )
    if output and (p.presence_penalty or p.frequency_penalty):
        counts = Counter(output)
        row[ids(list(counts))] -= p.frequency_penalty * numbers(list(counts.values())) + p.presence_penalty
