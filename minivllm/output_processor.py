"""Above the chapters: from an engine's token ids to the text that a caller sees."""

from __future__ import annotations

from dataclasses import replace

from minivllm.decoding.detokenizer import Detokenizer
from minivllm.decoding.stopping import StopStrings, stop_token_ids
from minivllm.model.tokenizer import Tokenizer
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.scheduling.request import Request


class RequestState:
    """One request's text as it grows. prompt: its text where it was given as text."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer):
        self.request, self.prompt = request, prompt
        self._detokenizer = Detokenizer(tokenizer)
        self._text = StopStrings(tuple(request.params.stop))
        self._num_read = 0  # output tokens that have been turned to text
        self._complete = False  # no text will be added any more

    @property
    def text(self) -> str:
        """The text so far, as far as it is certain."""
        return self._text.text

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.request.finish_reason is not None

    @property
    def has_news(self) -> bool:
        """Whether a token or the end has come that was not turned to text yet."""
        unread = self._num_read < len(self.request.output_token_ids) or self.finished
        return unread and not self._complete

    def read_new_tokens(self) -> str | None:
        """Turn the tokens that have come since the last call to text; returns the stop string that ends it.

        A token that itself ended the request adds no text. At the end nothing is held back any more.
        """
        tokens = self.request.output_token_ids
        while self._num_read < len(tokens) and not self._complete:
            token = tokens[self._num_read]
            self._num_read += 1
            if self._num_read == len(tokens) and self._ended_by(token):
                break
            if (stop := self._add(self._detokenizer.add(token))) is not None:
                return stop
        if self.finished and not self._complete:
            if (stop := self._add(self._detokenizer.flush())) is not None:
                return stop
            self._text.flush()
            self._complete = True
        return None

    def output(self) -> RequestOutput:
        """What is known now."""
        r = self.request
        logprobs = list(r.logprobs) if r.params.logprobs is not None else None
        chosen = zip(r.output_token_ids, r.logprobs, strict=False)
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=list(r.output_token_ids),
            finish_reason=r.finish_reason,
            stop_reason=r.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(at[t].logprob for t, at in chosen),
        )
        metrics = replace(r.metrics, token_times=list(r.metrics.token_times))
        return RequestOutput(
            r.request_id, self.prompt, list(r.prompt_token_ids), [completion], self.finished, metrics
        )

    def _ended_by(self, token: int) -> bool:
        r = self.request
        return r.finish_reason == "stop" and token in stop_token_ids(r.params, r.eos_token_ids)

    def _add(self, piece: str) -> str | None:
        may_stop = self._num_read > self.request.params.min_tokens
        stop = self._text.add(piece, may_stop=may_stop)
        self._complete = stop is not None
        return stop
