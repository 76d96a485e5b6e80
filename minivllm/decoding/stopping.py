"""Chapter 0: when a sequence ends: by a token, by its length, or by a string in its text.

A token is looked at by its id, so it ends a sequence at once. A stop string is looked for in the text, and
may begin in one token and end in another; text that could be its beginning is held back until it is
certain, or a stream would show what the answer does not contain.

    stop "\\n\\n"     tokens  "Paris"   ".\\n"    "\\n"
                    given   "Paris"   "."      stop: the text is "Paris."
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.params import SamplingParams


def stop_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """All tokens that end a sequence."""
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))


def finish_reason(
    output_token_ids: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int], max_tokens: int
) -> str | None:
    """Why the sequence ends with the last of these tokens: "stop", "length", or None when it goes on."""
    last, length = output_token_ids[-1], len(output_token_ids)
    stops = last in params.stop_token_ids or (last in eos_token_ids and not params.ignore_eos)
    if stops and length > params.min_tokens:
        return "stop"
    return "length" if length >= max_tokens else None


def longest_beginning(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text with which a stop string begins, without being all of it."""
    longest = max((len(s) for s in stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-length:]) for s in stop):
            return length
    return 0


class StopStrings:
    """The text of one sequence as it may be shown, with stop strings looked for.

    stop: the stop strings. text: what may be shown. held: the end of what has come, which is kept back
    because a stop string may begin with it.

    Invariant: `text` never holds a stop string, nor the beginning of one that might still come.
    """

    def __init__(self, stop: Sequence[str]):
        self.stop = stop
        self.text = ""
        self.held = ""

    def add(self, piece: str, *, may_stop: bool = True) -> str | None:
        """Take a piece of text. Returns the stop string that it completes, or None; text and held follow.

        Of several it is the one that begins first, of those the shorter; text then ends before it, and
        nothing is held. While may_stop is False nothing stops, and nothing of this piece can be part of a
        later stop.
        """
        pending = self.held + piece
        found = [(at, s) for s in self.stop if (at := pending.find(s)) >= 0] if may_stop else []
        if found:
            at, stop = min(found, key=lambda pair: (pair[0], len(pair[1])))
            self.text, self.held = self.text + pending[:at], ""
            return stop
        keep = longest_beginning(pending, self.stop) if may_stop else 0
        self.text += pending[: len(pending) - keep]
        self.held = pending[len(pending) - keep :]
        return None

    def flush(self) -> None:
        """The sequence has ended for another reason: what was held back is text."""
        self.text, self.held = self.text + self.held, ""
