"""Chapter 0: tokens to text while they come, without broken characters.

A token need not be a whole character: an emoji may take three tokens, and until the last of them the
text ends in a replacement character. So text is held back until it is whole. Nor does a token always
have the same text: some tokenizers drop a leading space at the start of a text. So each new token is
decoded behind a few before it, and only what it adds is given out. How few is a matter of time alone: to
begin at a later token costs a decode, and so does every token that is decoded again.
"""

from __future__ import annotations

from minivllm.model.tokenizer import Tokenizer

_MOST_AGAIN = 8  # tokens
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one sequence, piece by piece: all pieces joined are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # tokens from here to _done are decoded again, for the new ones to stand behind
        self._done = 0  # tokens before this one have been given out
        self._num_given = 0  # characters that the tokens from _context to _done have given

    def add(self, token: int) -> str:
        """The text that became certain with this token; often its own, sometimes none."""
        self._tokens.append(token)
        piece = self._pending()
        return "" if piece.endswith(_UNFINISHED) else self._give_out(piece)

    def flush(self) -> str:
        """What is left at the end, whole or not."""
        return self._give_out(self._pending())

    def _pending(self) -> str:
        return self._tokenizer.decode(self._tokens[self._context :])[self._num_given :]

    def _give_out(self, piece: str) -> str:
        if piece:
            begin, self._done = self._done, len(self._tokens)
            self._num_given += len(piece)
            if self._done - self._context > _MOST_AGAIN:
                self._context, self._num_given = begin, len(self._tokenizer.decode(self._tokens[begin:]))
        return piece
