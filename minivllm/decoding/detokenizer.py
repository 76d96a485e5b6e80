"""Chapter 0: tokens to text while they come, without broken characters.

A token need not be a whole character: an emoji may take three tokens, and until the last of them the
text ends in a replacement character. So text is held back until it is whole. Nor does a token always
have the same text: some tokenizers drop a leading space at the start of a text. So each new token is
decoded behind the few before it, and only what it adds is given out.
"""

from __future__ import annotations

from minivllm.model.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one sequence, piece by piece: all pieces joined are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # tokens from here to _done are decoded again, for the new ones to stand behind
        self._done = 0  # tokens before this one have been given out

    def add(self, token: int) -> str:
        """The text that became certain with this token; often its own, sometimes none."""
        self._tokens.append(token)
        piece = self._pending()
        return "" if piece.endswith(_UNFINISHED) else self._give_out(piece)

    def flush(self) -> str:
        """What is left at the end, whole or not."""
        return self._give_out(self._pending())

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._done])
        return self._tokenizer.decode(self._tokens[self._context :])[len(before) :]

    def _give_out(self, piece: str) -> str:
        if piece:
            self._context, self._done = self._done, len(self._tokens)
        return piece
