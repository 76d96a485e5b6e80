"""Chapter 4: beam search, which looks for the likeliest text instead of drawing one.

A search follows beam_width continuations at once. In each step every one of them could go on with any token;
of all these candidates the likeliest are kept, so one beam may have several children and another none:

    beam_width 2       the, -0.6  ->  the cat, -1.1    the dog, -1.3    the sun, -2.9
                       one, -0.9  ->  one day, -1.2    one cat, -4.0    one dog, -4.5
    live after it      the cat, -1.1 and one day, -1.2

A candidate that ends with the end-of-sequence token leaves the beams and is a finished hypothesis, if it is
among the beam_width likeliest candidates; the next ones take the places in the beam. With E such tokens, at
most E * beam_width candidates end, so (1 + E) * beam_width are enough to fill all places.

Each added token makes the sum of log-probabilities smaller, so sums favour short texts. What is finished is
therefore compared by its score, cumulative_logprob / length ** length_penalty.

The rules are those of Transformers' `generate(num_beams=beam_width, do_sample=False)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minivllm.params import BeamSearchParams


@dataclass(frozen=True)
class Beam:
    """A continuation that goes on: its tokens so far, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(frozen=True)
class Hypothesis:
    """A continuation that has ended.

    token_ids: the output alone, the end-of-sequence token included. score: what hypotheses are compared by.
    finish_reason: "stop" by that token, "length" by max_tokens.
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


class Candidate(NamedTuple):
    """A live beam with one more token: the sum of log-probabilities with it, the beam's row, the token."""

    logprob: float
    row: int
    token: int


class BeamSearch:
    """The search for one request: which beams live, and what has finished. It knows nothing of memory, nor
    of tensors: `top_candidates` makes its candidates from logits.

    max_tokens: the limit, which may be lower than that of params. live: the beams, best first; empty when
    the search is over. finished: the best hypotheses so far, best first, beam_width at most.

    State is two tuples, replaced at the end of `choose`: copy.copy(search) is a snapshot of it.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: Sequence[int]):
        self.params = params
        self.max_tokens = max_tokens
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.live: tuple[Beam, ...] = (Beam(),)
        self.finished: tuple[Hypothesis, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the search is over."""
        return not self.live

    @property
    def scores(self) -> list[float]:
        """The live beams' sums of log-probabilities."""
        return [beam.logprob for beam in self.live]

    def best(self) -> list[Hypothesis]:
        """What the search has found, best first: beam_width hypotheses when it is over."""
        return list(self.finished)

    @property
    def num_candidates(self) -> int:
        """How many candidates `choose` needs, so that beam_width of them go on."""
        return self.params.beam_width * (1 + len(self.eos_token_ids))

    def choose(self, candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
        """Go one token on: candidates, best first, become live beams and hypotheses.

        Returns (parent row, token) of each new live beam, best first; none when the search is over.
        """
        width = self.params.beam_width
        live: list[Beam] = []
        chosen: list[tuple[int, int]] = []
        finished = list(self.finished)
        for rank, (logprob, row, token) in enumerate(candidates):
            beam = Beam((*self.live[row].token_ids, token), logprob)
            reason = "stop" if token in self.eos_token_ids else None
            if reason is None and len(beam.token_ids) >= self.max_tokens:
                reason = "length"
            if reason is not None and rank < width:
                score = self.score(logprob, len(beam.token_ids))
                finished.append(Hypothesis(list(beam.token_ids), logprob, score, reason))
            elif reason is None and len(live) < width:
                live.append(beam)
                chosen.append((row, token))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:width]
        if not self._goes_on(live, finished):
            live, chosen = [], []
        self.live, self.finished = tuple(live), tuple(finished)
        return chosen

    def _goes_on(self, live: Sequence[Beam], finished: Sequence[Hypothesis]) -> bool:
        """Whether the best live beam may still become better than the worst hypothesis that is kept."""
        if not live or len(finished) < self.params.beam_width:
            return bool(live)
        if self.params.early_stopping is True:
            return False
        length = len(live[0].token_ids)
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_tokens  # the sum, below 0, can only fall; this length divides it by most
        return self.score(live[0].logprob, length) > finished[-1].score

    def score(self, logprob: float, length: int) -> float:
        """What a continuation of this length is ranked by."""
        return logprob / length**self.params.length_penalty
