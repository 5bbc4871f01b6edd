"""The errors that users meet, each with its HTTP status and exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping

# The error type in OpenAI's API for each HTTP status. Other statuses have the type of 400, or of 500.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    501: "invalid_request_error",
    502: "upstream_error",
    504: "upstream_error",
}


class LightningError(Exception):
    """The base of all our errors. Its message tells users what is wrong, where, and what to do."""

    status = 500
    type: str | None = None  # None: the type of the status
    exit_code = 1
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the error in OpenAI's shape."""
        kind = self.type or TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ConfigError(LightningError):
    """The user must change something: configuration, options, files, or what is installed or running."""

    exit_code = 2


class InvalidRequest(LightningError):
    status = 400


class Unauthorized(LightningError):
    status = 401


class Forbidden(LightningError):
    status = 403


class NotFound(LightningError):
    status = 404


class MethodNotAllowed(LightningError):
    status = 405


class RequestTimeout(LightningError):
    """The client did not send its request in time. The connection is closed, because its state is unknown."""

    status = 408
    headers = ((b"connection", b"close"),)


class Conflict(LightningError):
    status = 409


class TooLarge(LightningError):
    status = 413


class UnsupportedMediaType(LightningError):
    status = 415


class Unprocessable(LightningError):
    status = 422


class UpgradeRequired(LightningError):
    """A client asked for a WebSocket. Some clients fall back to HTTP only on this status."""

    status = 426
    headers = ((b"upgrade", b"HTTP/1.1"),)


class RateLimited(LightningError):
    """A key has reached its limit. The headers say when to try again, as in OpenAI's API."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float, headers: Mapping[str, str] = {}) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        again = {"retry-after": math.ceil(retry_after_s), "retry-after-ms": math.ceil(retry_after_s * 1000)}
        self.headers = tuple((name.encode(), str(value).encode()) for name, value in {**again, **headers}.items())


class Unsupported(LightningError):
    """The upstream or this installation does not support the requested API."""

    status = 501


class UpstreamUnreachable(LightningError):
    """The upstream could not be reached, failed during its answer, or sent an invalid one."""

    status = 502


class StoreUnavailable(LightningError):
    """The store cannot be opened, read or written, for example because it is locked, full or damaged."""

    status = 503
    headers = ((b"retry-after", b"1"),)


class OtherSchema(StoreUnavailable):
    """The store has no tables of ours, or tables of another version. It is left unchanged."""

    exit_code = 2


class Overloaded(LightningError):
    """There are too many large requests, unread answers or connections at once."""

    status = 503
    headers = ((b"retry-after", b"1"),)


class UpstreamTimeout(LightningError):
    status = 504


class NotSaved(LightningError):
    """A checkpoint or weights could not be written (disk full, no permission). No partial files are left."""


class PublishError(LightningError):
    """New weights could not be published. The previous version stays live, or goes live again."""


class TrainingUnavailable(LightningError):
    """The service that takes the training steps is down, or failed. Training resumes from its last saved state."""
