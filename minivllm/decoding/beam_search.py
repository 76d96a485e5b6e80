"""Chapter 4: beam search on a model: the likeliest continuations of the beams, and the loop over steps.

Which candidates live on is decided in `decoding/beams.py`. What lives is one branch of the prompt for each
beam, so the beams share the blocks of all that they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.decoding.beams import BeamSearch, Candidate, Hypothesis
from minivllm.decoding.branches import Branches
from minivllm.decoding.generate import check_prompt
from minivllm.errors import InvalidLogits
from minivllm.memory.sharing import SharingManager
from minivllm.memory.sharing_store import SharingStore
from minivllm.model.decoder import Decoder
from minivllm.outputs import SharingReport
from minivllm.params import BeamSearchParams


def top_candidates(logits: Tensor, scores: Sequence[float], k: int) -> list[Candidate]:
    """The k likeliest continuations of the live beams by one token, best first.

    logits [live beams, vocab_size]; scores: the beams' sums of log-probabilities so far. Among equals the
    lower row comes first, then the lower token id. A token of probability 0 is no candidate. Raises
    InvalidLogits for a row that holds NaN or has no finite maximum.
    """
    if len(logits) != len(scores):
        raise ValueError(f"{len(logits)} rows of logits and {len(scores)} live beams do not match.")
    largest = logits.max(dim=-1).values
    if not largest.isfinite().all():
        row = int(largest.isfinite().logical_not().nonzero()[0])
        raise InvalidLogits(
            f"Row {row} of the logits has {largest[row].item()} for its maximum, so no beam can go on. "
            "The weights are damaged, or the dtype is too narrow for this model: try dtype='float32'.",
            row,
        )
    before = torch.tensor(scores, dtype=torch.float64, device=logits.device)
    sums = (logits.double().log_softmax(dim=-1) + before[:, None]).flatten()
    worst = sums.topk(min(k, len(sums))).values[-1]
    places = (sums >= worst).nonzero()[:, 0]  # by row, then by token: topk alone promises no order of equals
    best, order = sums[places].sort(descending=True, stable=True)
    pairs = zip(best[:k].tolist(), places[order[:k]].tolist(), strict=True)
    vocab_size = logits.shape[-1]
    return [Candidate(s, *divmod(place, vocab_size)) for s, place in pairs if s > float("-inf")]


def advance(search: BeamSearch, logits: Tensor) -> list[tuple[int, int]]:
    """Take a search one token on. Returns (parent row, token) of each new live beam, best first.

    logits [live beams, vocab_size]: one row at first, then beam_width; fewer only where the vocabulary is so
    small. Raises InvalidLogits, and then nothing has changed.
    """
    return search.choose(top_candidates(logits, search.scores, search.num_candidates))


@torch.inference_mode()
def beam_search(
    model: Decoder,
    store: SharingStore,
    manager: SharingManager,
    prompt: Sequence[int],
    params: BeamSearchParams,
    seq_id: int = 0,
) -> tuple[list[Hypothesis], SharingReport]:
    """The beam_width best continuations that a beam search finds, best first, and what sharing saved.

    The loop of `decoding/generate.py` with a search in the sampler's place: what lives is one branch of the
    prompt for each beam. Raises InvalidPrompt, OutOfBlocks. The memory lets go of all at the end.
    """
    check_prompt(prompt, model.config)
    max_tokens = min(params.max_tokens, model.config.max_position_embeddings - len(prompt))
    search = BeamSearch(params, max_tokens, model.config.eos_token_ids)
    branches = Branches(model, store, manager, prompt, seq_id)
    try:
        while not search.done:
            branches.become(advance(search, branches.step()))
    finally:
        branches.free()
    return search.best(), branches.report
