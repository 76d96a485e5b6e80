"""Chapter 0: the project's own errors, so that a caller can tell a bad request from a bug.

Every message says what was wrong, what was expected and what to do. After any of them
the model and the memory can still be used.
"""


class MinivllmError(Exception):
    """The root of every error that this package raises on purpose."""


class InvalidOption(MinivllmError, ValueError):
    """An option has a value that cannot be had: the message names the option and what would work."""


class InvalidPrompt(MinivllmError, ValueError):
    """A prompt is empty, holds a token id outside the vocabulary, or is not a prompt at all."""


class RequestTooLong(InvalidPrompt):
    """A request can never fit: its prompt is longer than the model or the memory allows."""


class InvalidRequestFile(MinivllmError, ValueError):
    """A file of requests has a line that is no request: the message names file and line."""


class InvalidResultFile(MinivllmError, ValueError):
    """A file of kept measurements is damaged, or does not say where its numbers come from."""


class ModelNotFound(MinivllmError, LookupError):
    """No model answers to this name, or it is not on disk and cannot be downloaded."""


class InvalidModel(MinivllmError, ValueError):
    """A model is there but cannot be used: an architecture or option that is not supported."""


class InvalidModelFile(InvalidModel):
    """A file of weights is damaged, truncated, or not what its name says."""


class WeightMismatch(InvalidModel):
    """Tensors are missing, extra or misshapen; each one is named."""


class InvalidLogits(MinivllmError, ArithmeticError):
    """A row of logits holds NaN or has no finite maximum, so no token can be chosen.

    row: its number. request_id: whose it is, where an engine knows.
    """

    def __init__(self, message: str, row: int = 0, request_id: int | None = None):
        super().__init__(message)
        self.row, self.request_id = row, request_id


class OutOfMemory(MinivllmError, RuntimeError):
    """The KV memory has no room for what was asked. Nothing was changed."""


class OutOfBlocks(OutOfMemory):
    """The block pool has fewer free blocks than were asked for. None was taken."""


class PrefixCacheInUse(MinivllmError, RuntimeError):
    """Cached blocks cannot be forgotten while sequences hold blocks. Nothing was changed."""


class EngineBusy(MinivllmError, RuntimeError):
    """The engine is in the middle of a step, so a listener of this step cannot start another."""


class EngineClosed(MinivllmError, RuntimeError):
    """The engine was closed and has let go of its model; make a new one."""
