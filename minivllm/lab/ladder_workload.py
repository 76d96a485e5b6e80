"""Above the chapters: the ladder's own requests, passages of real text, and a budget too small for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minivllm.lab.workload import WorkloadRequest, make_workload
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.size import bytes_per_token
from minivllm.model.decoder import Decoder
from minivllm.model.tokenizer import Tokenizer

NUM_REQUESTS = 20
LENGTHS = {"seed": 5, "mean_in": 24, "mean_out": 16, "max_in": 64, "max_out": 36}
LEAST_SLOTS = 16  # a block
TEXT = (
    "A language model writes one token at a time. For each new token it looks back at every token before "
    "it, and to look back it needs a key and a value for each of them. The simplest way to have them is "
    "to compute them anew at every step. The next is to keep them, and then somebody has to decide where. "
    "If each request gets a shelf as long as the longest book, most shelves stay almost empty, and the "
    "room is full while readers wait at the door. If the shelves are cut into short boards, a book takes "
    "only the boards that it fills, and the boards need not hang side by side. A small table says which "
    "board comes next. Readers come and go at their own pace: one wants a single page, another a whole "
    "chapter, and nobody knows beforehand which of them it will be. A good librarian lets a new reader in "
    "as soon as a place is free, and does not wait until the whole table has finished. When all boards "
    "are taken, the one who came last gives his back and begins again later. Every reader reads the same "
    "words as before; only the waiting has become shorter."
)


def default_requests(
    tokenizer: Tokenizer, n: int = NUM_REQUESTS, seed: int = LENGTHS["seed"]
) -> list[WorkloadRequest]:
    """n requests: passages of TEXT that begin where a word does, with log-normal lengths of 24 tokens in and
    16 out on average, short enough that recomputing them all takes half a minute on two cores.

    seed: of the lengths.
    """
    words = TEXT.split(" ")
    requests = []
    for number, request in enumerate(make_workload(n, **{**LENGTHS, "seed": seed})):
        begin = 29 * number % len(words)
        tokens = tokenizer.encode(" ".join([*words[begin:], *words]))
        length = len(request.token_ids)
        requests.append(replace(request, prompt_token_ids=tuple(tokens[:length])))
    return requests


def default_budget(model: Decoder, requests: Sequence[WorkloadRequest]) -> int:
    """Bytes of KV memory: too few for all requests at once, and enough for each.

    A power of two of slots, the largest below what all of them need together: so it matters who comes in.
    """
    needs = [len(r.token_ids) + r.max_tokens - 1 for r in requests]
    together = 1 << (max(sum(needs) - 1, 1).bit_length() - 1)
    return max(together, BuddyAllocator.run_length(max(needs)), LEAST_SLOTS) * bytes_per_token(model)
