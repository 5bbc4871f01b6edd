"""The errors of this client."""

from __future__ import annotations


class ClientError(Exception):
    """The base of all errors here. Its text says what was wrong and what to do."""


class NoRollout(ClientError, RuntimeError):
    """Something was emitted outside of any rollout."""


class ProxyUnreachable(ClientError):
    """No proxy listens there, or it only asked to try again for `patience_s` seconds."""


class Refused(ClientError):
    """The proxy answered with an error and recorded nothing. Sending it again would not help."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.param = param
