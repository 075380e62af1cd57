"""Everything that outside input can raise, as one tree.

    JaxserveError
    ├── InvalidRequest          the caller's request is wrong (HTTP 400)
    │   ├── PromptTooLong       prompt (plus max_tokens) does not fit the model
    │   └── ChatTemplateError   the model's chat template refused the messages
    ├── ModelNotFound           no such model here (HTTP 404, exit 2)
    ├── Overloaded              the queue is full, try again (HTTP 429)
    ├── ShuttingDown            the engine drains or is closed (HTTP 503)
    ├── EngineDied              the engine thread stopped on an internal error (HTTP 500)
    ├── ConfigError             options that cannot work, found at start (exit 2)
    └── DownloadError           a model could not be fetched (exit 1)

Each message says what came, what is allowed and what to do. Damaged or unsupported model files raise
`checkpoints.errors.CheckpointError`, which lives below this package and is no JaxserveError; the command line and
the server treat both alike. Broken internal invariants are asserts, never one of these.
"""


class JaxserveError(Exception):
    """Root of every error that outside input can cause."""


class InvalidRequest(JaxserveError):
    """A request that can never succeed as sent. `param` names the offending field, as OpenAI's errors do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt, or prompt and max_tokens together, exceed what the model or the KV cache can hold."""


class ChatTemplateError(InvalidRequest):
    """The chat template raised on these messages (for example: roles must alternate)."""


class ModelNotFound(JaxserveError):
    """The named model is neither in the catalog, nor on disk, nor served here."""


class Overloaded(JaxserveError):
    """The waiting queue is full; nothing was queued. `retry_after_seconds` is the advice for Retry-After."""

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ShuttingDown(JaxserveError):
    """The engine drains or is closed and accepts no new request."""


class EngineDied(JaxserveError):
    """The engine thread stopped on an internal error; its message carries the first cause."""


class ConfigError(JaxserveError):
    """Options that cannot work together or on this machine, found before anything is loaded."""


class DownloadError(JaxserveError):
    """A model file could not be fetched or does not have the expected digest."""
