"""Above the chapters: the ladder's own requests, passages of real text, and a budget too small for all.

PATTERN     what each is for
n = 4       samples of one prompt: without sharing, each has a prompt of its own (chapter 4)
all         begin with the same SYSTEM prompt: once it is in memory, it need not be computed (chapter 5)
short       outputs of many lengths: in a closed batch, places stand empty (chapter 6)
long        whole, such a prompt makes all others wait for its step (chapter 7)
"""

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
BLOCK = 16  # slots
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


SYSTEM = "You are the librarian of a small town. Go on writing this page in the same plain voice:"
NUM_SYSTEM = 20  # tokens: a full block and a piece of the next, as it happens with real ones
TEMPERATURE = 0.8  # of the samples
# (tokens of the passage, output tokens, samples) of one request after another
LENGTHS_AND_SAMPLES = (
    (9, 8, 4), (6, 19, 1), (110, 4, 1), (12, 5, 1), (7, 9, 4), (4, 24, 1),
    (11, 6, 1), (5, 14, 1), (8, 7, 4), (100, 3, 1), (13, 10, 1), (10, 4, 1),
)  # fmt: skip
NUM_LADDER_REQUESTS = len(LENGTHS_AND_SAMPLES)


def ladder_requests(tokenizer: Tokenizer, n: int = NUM_LADDER_REQUESTS) -> list[WorkloadRequest]:
    """n requests with LENGTHS_AND_SAMPLES, beginning again after the last: SYSTEM, then a passage of TEXT.

    Few and short enough that recomputing them all takes half a minute on two cores.
    """
    words, system = TEXT.split(" "), tokenizer.encode(SYSTEM)[:NUM_SYSTEM]
    requests = []
    for number in range(n):
        num_in, num_out, samples = LENGTHS_AND_SAMPLES[number % NUM_LADDER_REQUESTS]
        begin = 29 * number % len(words)
        passage = tokenizer.encode(" ".join(["", *words[begin:], *words]))[:num_in]
        request = WorkloadRequest((*system, *passage), None, num_out)
        if samples > 1:
            request = replace(request, n=samples, temperature=TEMPERATURE, seed=10 * number)
        requests.append(request)
    return requests


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
    """Bytes of KV memory: too few for all sequences at once, and enough for each and for a group.

    A power of two of slots, the largest below what all of them need together: so it matters who comes in.
    """
    needs = [len(r.token_ids) + r.max_tokens - 1 for r in requests for _ in range(r.n)]
    together = 1 << (max(sum(needs) - 1, 1).bit_length() - 1)
    groups = [r.n * BLOCK * -(-(len(r.token_ids) + r.max_tokens - 1) // BLOCK) for r in requests if r.n > 1]
    return max(together, *map(BuddyAllocator.run_length, (max(needs), *groups, BLOCK))) * bytes_per_token(
        model
    )
