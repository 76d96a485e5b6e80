"""Chapter 1: the decode loop on a KV memory: each step computes only what memory does not have.

The loop of `decoding/generate.py` without sampling, so that the one idea of this chapter can be seen alone:
num_computed, how many of a sequence's tokens have their keys and values in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder


@torch.inference_mode()
def greedy(
    model: Decoder, store: KVStore, prompt: Sequence[int], num_tokens: int, seq_id: int = 0
) -> list[int]:
    """The num_tokens token ids that follow a prompt, each the one with the highest logit.

    `Batch.pack` takes (seq_id, new token ids, tokens already in memory). A store with keeps_kv has every
    token that it was given; another has none when the next step begins. The store lets go of the sequence at
    the end, also where the model fails.
    """
    tokens, num_computed = list(prompt), 0
    try:
        while len(tokens) < len(prompt) + num_tokens:
            batch = Batch.pack([(seq_id, tokens[num_computed:], num_computed)], model.device)
            next_token = int(model(batch, store).argmax())
            num_computed = len(tokens) if store.keeps_kv else 0
            tokens.append(next_token)
    finally:
        store.free(seq_id)
    return tokens[len(prompt) :]
