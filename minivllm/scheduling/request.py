"""Chapter 6: a request: what was asked, and the sequences that answer it.

A request has one sequence as a rule, and several where it asks for several answers or for a beam search
(chapter 4): its group. A group is scheduled, preempted and swapped as a whole.

The sequences of a group begin with the same tokens. Until these are computed the first sequence stands for
all; then the others are forked from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import replace
from enum import Enum
from functools import cached_property
from random import Random

from minivllm.decoding.beams import BeamSearch
from minivllm.decoding.stopping import finish_reason
from minivllm.errors import InvalidOption
from minivllm.outputs import Logprob, RequestMetrics, SharingReport
from minivllm.params import BeamSearchParams, SamplingParams
from minivllm.scheduling.sequence import Sequence


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One prompt, what was asked for it, and the sequences that answer it.

    params: SamplingParams, or BeamSearchParams for a beam search. max_model_len: most tokens that prompt and
    output may have together; None: as many as params say. generator: the first sequence's; None: from
    params.seed, and the i-th sequence's from seed + i. priority: of two the lower number comes first, where
    the scheduler asks for it. cache_salt: only requests with the same find each other's prefixes.

    The first sequence has the request's id, the k-th that comes into being has id + k * 2**32.

    live: sequences that go on. forked: whether each of them has its own block table; a request with one
    sequence needs no fork. num_common_tokens: what the first computes for all before that.
    arrival: its number in the order of arrival. num_preemptions: how often it lost its memory.
    num_cached_tokens: prompt tokens that it found in memory when it first began; has_begun: whether a prefix
    cache was asked for that already. finish_reason: None while
    a sequence goes on. search: the state of a beam search.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Tokens[int],
        params: SamplingParams | BeamSearchParams,
        eos_token_ids: Tokens[int] = (),
        max_model_len: int | None = None,
        generator: Random | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ):
        self.request_id, self.prompt_token_ids, self.params = request_id, prompt_token_ids, params
        self.eos_token_ids, self.max_model_len = eos_token_ids, max_model_len
        self.priority, self.cache_salt = priority, cache_salt
        self.metrics = RequestMetrics()
        self.status = Status.WAITING
        self.arrival = self.num_preemptions = self.num_cached_tokens = 0
        self.num_common_tokens = len(prompt_token_ids)
        self.has_begun = False
        self.sharing: SharingReport | None = None
        self._num_sequences = 0
        self.search: BeamSearch | None = None
        if isinstance(params, BeamSearchParams):
            self.search = BeamSearch(params, self.max_tokens, eos_token_ids)
            self.sequences = [self._new_sequence(Random())]
        else:
            self.sequences = [self._new_sequence(_generator(params.seed, i)) for i in range(params.n)]
            if generator is not None:
                self.sequences[0].generator = generator
        self.live = list(self.sequences)
        self.forked = self.width == 1

    @cached_property
    def width(self) -> int:
        """Most sequences that it has at once."""
        if isinstance(self.params, BeamSearchParams):
            return self.params.beam_width
        return self.params.n

    @property
    def first(self) -> Sequence:
        """The first of the sequences that go on; it stands for all while they are not forked."""
        return self.live[0]

    @property
    def holders(self) -> list[Sequence]:
        """The sequences that hold memory while the request runs."""
        return self.live if self.forked else self.live[:1]

    @property
    def num_seqs(self) -> int:
        """Sequences that go on, or that will once they are forked."""
        return self.width if self.search is not None else len(self.live)

    @cached_property  # it stays, and is asked for with every token
    def max_tokens(self) -> int:
        """Most tokens that a sequence may generate."""
        if self.max_model_len is None:
            return self.params.max_tokens
        return min(self.params.max_tokens, self.max_model_len - len(self.prompt_token_ids))

    @property
    def longest(self) -> int:
        """Tokens of a sequence in memory at the most; the last one's key and value are never needed."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far, of the first sequence."""
        return self.sequences[0].num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the first sequence whose keys and values are in memory."""
        return self.sequences[0].num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output of the first sequence."""
        return self.sequences[0].output_token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]]:
        """The log-probabilities of the first sequence."""
        return self.sequences[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, with its first sequence's reason; None while a sequence goes on."""
        return None if self.live else self.sequences[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token that ended its first sequence."""
        return self.sequences[0].stop_reason

    def target(self, sequence: Sequence) -> int:
        """Tokens that a sequence computes before its next token, or the fork, can come."""
        return sequence.num_tokens if self.forked else self.num_common_tokens

    def missing(self) -> list[tuple[Sequence, int]]:
        """The sequences that hold memory while it runs, and how many tokens each has to compute."""
        if not self.forked:
            return [(self.first, self.num_common_tokens - self.first.num_computed_tokens)]
        return [(s, len(s.token_ids) - s.num_computed_tokens) for s in self.live]

    @property
    def samples_together(self) -> bool:
        """Whether the group is not forked yet and all its next tokens come from one row of logits."""
        return not self.forked and self.num_common_tokens == self.first.num_tokens

    def number(self, request_id: int) -> None:
        """Give its id to a request that was made, and perhaps split, with id 0."""
        self.request_id += request_id
        for sequence in self.sequences:
            sequence.seq_id += request_id

    def split(self) -> list[Request]:
        """One request for each sequence, for a memory that cannot share; ids and chance stay the same."""
        if self.width == 1:
            return [self]
        if isinstance(self.params, BeamSearchParams):
            raise InvalidOption("A beam search needs a memory whose blocks can be shared: cache='paged'.")
        parts = []
        for sequence in self.sequences:
            part = Request(
                sequence.seq_id,
                self.prompt_token_ids,
                replace(self.params, n=1),
                self.eos_token_ids,
                self.max_model_len,
                sequence.generator,
                priority=self.priority,
                cache_salt=self.cache_salt,
            )
            part.sequences[0].index = sequence.index
            parts.append(part)
        return parts

    def append(self, sequence: Sequence, token: int) -> None:
        """A sequence takes a generated token, and finishes where it or the length says so."""
        assert isinstance(self.params, SamplingParams)
        sequence.append(token)
        reason = finish_reason(sequence.output_token_ids, self.params, self.eos_token_ids, self.max_tokens)
        if reason is not None:
            stop = token if reason == "stop" and token in self.params.stop_token_ids else None
            self.finish_sequence(sequence, reason, stop)

    def branch(self, parent: Sequence) -> Sequence:
        """A further sequence with the tokens of another."""
        self._num_sequences += 1
        return parent.fork(self.request_id + (self._num_sequences - 1) * 2**32)

    def begin_again(self) -> None:
        """All memory is lost: what its sequences have in common is computed once, then they are forked."""
        for sequence in self.live:
            sequence.num_recomputed_to = max(sequence.num_recomputed_to, sequence.num_computed_tokens)
            sequence.num_computed_tokens = 0
        self.forked = self.num_seqs == 1
        self.num_common_tokens = _common([sequence.token_ids for sequence in self.live])

    def finish_sequence(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End one sequence for this reason, and with the last of them the request."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.live = [other for other in self.live if other is not sequence]
        if not self.live:
            self.status = Status.FINISHED

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End all sequences that go on for this reason."""
        for sequence in self.live:
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.live, self.status = [], Status.FINISHED

    def _new_sequence(self, generator: Random) -> Sequence:
        self._num_sequences += 1
        k = self._num_sequences - 1
        prompt = self.prompt_token_ids
        return Sequence(self.request_id + k * 2**32, k, array("q", prompt), len(prompt), generator)


def _generator(seed: int | None, index: int) -> Random:
    return Random() if seed is None else Random(seed + index)


def _common(sequences: Tokens[array[int]]) -> int:
    """Tokens with which all of these begin."""
    shortest, longest = min(sequences), max(sequences)  # what these two share, all between them share
    pairs = zip(shortest, longest, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(shortest), len(longest)))
