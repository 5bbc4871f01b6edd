"""What can go wrong between an agent and the proxy's control API."""

from __future__ import annotations


class ClientError(Exception):
    """Says what was wrong and what to do."""


class NoRollout(ClientError, RuntimeError):
    """Something was emitted outside of any rollout."""


class ProxyUnreachable(ClientError):
    """No answer, or none but that it should be tried again, for as long as the rollout is patient."""


class Refused(ClientError):
    """The proxy answered with an error: nothing was recorded, and it would not be if it was sent again."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.param = param
