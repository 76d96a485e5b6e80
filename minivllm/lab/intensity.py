"""Above the chapters: what one step of a decoder must compute and must move, counted from its shape.

A step multiplies every new token with every matrix of every layer, and the last token of each sequence with
the output matrix. It reads those matrices once, for all sequences together, and each sequence's own keys and
values once. The quotient of the two counts, FLOPs per byte, is the step's arithmetic intensity.

Left out, as small: norms, biases, the softmax, the embedding's rows. Left out of the bytes as well: the
numbers handed from one operation to the next, which a good kernel keeps near. So the bytes are the least
that a step can move, and the intensity is the highest that it can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.model.config import ModelConfig


@dataclass(frozen=True)
class StepCost:
    """flops: floating-point operations, of which a multiply-add is two. num_bytes: read or written."""

    flops: int
    num_bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes


def matrix_elements(config: ModelConfig) -> int:
    """Elements of the matrices of all layers: those that each new token is multiplied with."""
    query, key_value = config.num_attention_heads, 2 * config.num_key_value_heads
    attention = config.hidden_size * config.head_dim * (query + key_value + query)  # q, k and v, o
    mlp = 3 * config.hidden_size * config.intermediate_size  # gate, up, down
    return config.num_hidden_layers * (attention + mlp)


def step_cost(config: ModelConfig, work: Sequence[tuple[int, int]], element_size: int) -> StepCost:
    """What a step costs. work: (new tokens, tokens already in memory) of each sequence; element_size: bytes.

    FLOPs: 2 for each new token and element of `matrix_elements(config)`; 2 for each sequence and element of
    the output matrix, hidden_size x vocab_size; and in attention, for each layer, query head and pair of a
    new token and a token of its sequence, 2 * head_dim for the score and as many for the value. Pairs that
    the causal mask throws away are counted, since `causal_attention` computes them. Bytes: both kinds of
    matrices once, and the keys and values (`config.kv_elements_per_token`) of all tokens, old and new.
    """
    new_tokens = sum(new for new, _ in work)
    all_tokens = sum(new + computed for new, computed in work)
    pairs = sum(new * (new + computed) for new, computed in work)
    matrices = matrix_elements(config)
    output = config.hidden_size * config.vocab_size
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    flops = 2 * new_tokens * matrices + 2 * len(work) * output + 4 * heads * pairs
    elements = matrices + output + config.kv_elements_per_token * all_tokens
    return StepCost(flops, element_size * elements)
