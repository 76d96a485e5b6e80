"""Chapter 1: how many bytes keys and values take, and how many rows are copied to make room for more.

Whole numbers from the shape of a model, without a tensor: nothing here imports torch. The notebook counts the
same bytes on the real tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.model.config import ModelConfig
    from minivllm.model.decoder import Decoder


def kv_bytes_per_token(config: ModelConfig, bits_per_value: int) -> int:
    """Bytes that one token's keys and values take in all layers together.

    In each layer, each KV head keeps one key and one value for the token, each of head_dim numbers.
    bits_per_value: of one number, 16 for float16 and bfloat16; it may be less than a byte, as 4.
    """
    keys_and_values = 2 * config.num_hidden_layers * config.num_key_value_heads
    return keys_and_values * config.head_dim * bits_per_value // 8


def bytes_per_token(model: Decoder) -> int:
    """Bytes of one token's keys and values in all layers, in the model's dtype."""
    return kv_bytes_per_token(model.config, 8 * model.dtype.itemsize)


def copied_by_joining(prompt_len: int, output_len: int) -> int:
    """Old rows that are copied until a request has its output, where each new row is joined on.

    The first step puts the prompt_len rows of the prompt in memory and copies none. Each later step adds one
    row: it makes a tensor that is longer by one and copies the old rows into it. Every step gives one token
    of the output, and the last token's row is never put in memory. A row is the key or the value of one
    token in one layer; all layers' keys and values are copied alike. Needs prompt_len and output_len >= 1.
    """
    num_joins = output_len - 1
    return num_joins * prompt_len + num_joins * (num_joins - 1) // 2


def copied_by_doubling(prompt_len: int, output_len: int) -> tuple[int, int]:
    """The same where a full tensor gives way to one twice as long: (old rows copied, rows held at the end).

    Fewer than 2 x the rows in use are copied, and fewer than 2 x are held: the copy is paid for with memory.
    Raises ValueError when prompt_len or output_len is less than 1.
    """
    for name, n in (("prompt_len", prompt_len), ("output_len", output_len)):
        if n < 1:
            raise ValueError(f"{name}={n} is not possible: it must be at least 1.")
    used = prompt_len + output_len - 1
    copied, held = 0, prompt_len
    while held < used:
        copied += held
        held *= 2
    return copied, held
