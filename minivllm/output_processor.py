"""Above the chapters: from an engine's token ids to the texts that a caller sees."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.decoding.beams import BeamSearch, Hypothesis
from minivllm.decoding.detokenizer import Detokenizer
from minivllm.decoding.stopping import StopStrings, stop_token_ids
from minivllm.model.tokenizer import Tokenizer
from minivllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.params import SamplingParams
from minivllm.scheduling.request import Request
from minivllm.scheduling.sequence import Sequence as EngineSequence


class SequenceText:
    """One answer's text as it grows."""

    def __init__(self, request: Request, sequence: EngineSequence, tokenizer: Tokenizer):
        assert isinstance(request.params, SamplingParams)
        self.request, self.sequence, self.params = request, sequence, request.params
        self._detokenizer = Detokenizer(tokenizer)
        self._text = StopStrings(tuple(self.params.stop))
        self._num_read = 0  # output tokens that have been turned to text
        self._complete = False  # no text will be added any more

    @property
    def text(self) -> str:
        """The text so far, as far as it is certain."""
        return self._text.text

    @property
    def has_news(self) -> bool:
        """Whether a token or the end has come that was not turned to text yet."""
        if self._complete:
            return False
        s = self.sequence
        return self._num_read < len(s.output_token_ids) or s.finish_reason is not None

    def read_new_tokens(self) -> str | None:
        """Turn the tokens that have come since the last call to text; returns the stop string that ends it.

        A token that itself ended the sequence adds no text. At the end nothing is held back any more.
        """
        if self._complete:
            return None
        for token in self.sequence.output_token_ids[self._num_read :]:
            self._num_read += 1
            if self._ended_by(token):
                break
            if (stop := self._add(self._detokenizer.add(token))) is not None:
                return stop
        if self.sequence.finish_reason is not None:
            if (stop := self._add(self._detokenizer.flush())) is not None:
                return stop
            self._text.flush()
            self._complete = True
        return None

    def output(self) -> CompletionOutput:
        """What is known now."""
        s = self.sequence
        logprobs = list(s.logprobs) if self.params.logprobs is not None else None
        chosen = zip(s.output_token_ids, s.logprobs, strict=False)
        return CompletionOutput(
            index=s.index,
            text=self.text,
            token_ids=list(s.output_token_ids),
            finish_reason=s.finish_reason,
            stop_reason=s.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(at[t].logprob for t, at in chosen),
        )

    def _ended_by(self, token: int) -> bool:
        s = self.sequence
        if s.finish_reason != "stop" or self._num_read < len(s.output_token_ids):
            return False
        return token in stop_token_ids(self.params, self.request.eos_token_ids)

    def _add(self, piece: str) -> str | None:
        if not self.params.stop:  # nothing to look for
            self._text.text += piece
            return None
        may_stop = self._num_read > self.params.min_tokens
        stop = self._text.add(piece, may_stop=may_stop)
        self._complete = stop is not None
        return stop


class RequestState:
    """A caller's request: its texts as they grow. prompt: its text where it was given as text.

    requests: what the engine has of it: the request itself, or, in a memory that cannot share, one request
    for each of its sequences.
    """

    def __init__(self, requests: Sequence[Request], prompt: str | None, tokenizer: Tokenizer):
        self.requests, self.prompt, self._tokenizer = requests, prompt, tokenizer
        self.texts = [
            SequenceText(request, sequence, tokenizer)
            for request in requests
            if request.search is None
            for sequence in request.sequences
        ]

    @property
    def request_id(self) -> int:
        """The caller's number of it."""
        return self.requests[0].request_id

    @property
    def text(self) -> str:
        """The first answer's text so far, as far as it is certain."""
        return self.texts[0].text

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, of all answers."""
        return sum(len(s.output_token_ids) for request in self.requests for s in request.sequences)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return not any(request.live for request in self.requests)

    def news(self) -> list[SequenceText]:
        """The answers that have something which was not turned to text yet."""
        return [text for text in self.texts if text.has_news]

    def read_new_tokens(self) -> None:
        """Complete all texts, at the end."""
        for text in self.news():
            text.read_new_tokens()

    def output(self) -> RequestOutput:
        """What is known now."""
        first = self.requests[0]
        m = first.metrics
        if first.search is None:
            outputs = [text.output() for text in self.texts]
        else:
            outputs = [self._beam(i, found) for i, found in enumerate(self._hypotheses(first.search))]
        return RequestOutput(
            first.request_id,
            self.prompt,
            list(first.prompt_token_ids),
            outputs,
            self.finished,
            RequestMetrics(m.arrival_time, m.first_scheduled_time, list(m.token_times)),
            first.num_cached_tokens,
            first.sharing,
        )

    def _hypotheses(self, search: BeamSearch) -> list[Hypothesis]:
        """What a search has found; while it goes on, or when it was ended, its live beams are among it."""
        reason = self.requests[0].finish_reason or ""
        found = search.best()
        for beam in search.live if not search.done else ():
            if beam.token_ids:
                score = search.score(beam.logprob, len(beam.token_ids))
                found.append(Hypothesis(list(beam.token_ids), beam.logprob, score, reason))
        return sorted(found, key=lambda hypothesis: -hypothesis.score)[: search.params.beam_width]

    def _beam(self, index: int, found: Hypothesis) -> CompletionOutput:
        detokenizer = Detokenizer(self._tokenizer)
        shown = found.token_ids[:-1] if found.finish_reason == "stop" else found.token_ids
        text = "".join(map(detokenizer.add, shown)) + detokenizer.flush()
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(found.token_ids),
            finish_reason=found.finish_reason or None,
            cumulative_logprob=found.cumulative_logprob,
            score=found.score,
        )
