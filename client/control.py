"""A small client for the proxy's control API, and `answer`, which returns the text of a call's answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener
from uuid import uuid4

from tenacity import RetryCallState, Retrying, retry_if_exception_type
from tenacity.wait import wait_random_exponential

from .program import ClientError, ProxyUnreachable, Refused

ANSWER_S = 30.0  # timeout of one try
PATIENCE_S = 60.0
FIND_S = 5.0  # how long to look for a proxy that was never there, unless a patience is given
AGAIN = frozenset({408, 429, 502, 503, 504})
_BACKOFF = wait_random_exponential(multiplier=0.1, max=10)


class _Again(Exception):
    """This attempt failed, but the next one may succeed.

    `after_s`: the wait that the proxy asked for. `connected`: whether something listens at the proxy's address.
    """

    def __init__(self, why: str, after_s: float = 0.0, *, connected: bool = True) -> None:
        super().__init__(why)
        self.after_s = after_s
        self.connected = connected


@dataclass(frozen=True, slots=True)
class Control:
    """The control API of the proxy at `url`. A request is retried for up to `patience_s` seconds.

    `find_s`: how long a post with `first` waits for something to listen at `url`.
    """

    url: str
    api_key: str | None = None
    patience_s: float = PATIENCE_S
    find_s: float = PATIENCE_S

    def post(self, path: str, body: Any, headers: Mapping[str, str], *, first: bool = False) -> Any:
        """Post `body` and return the response's JSON. A retried post takes effect only once.

        Raises Refused, ProxyUnreachable, or ClientError if `body` has no JSON form.
        """
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ClientError(f"the value cannot be sent as JSON: {error}") from None
        own = {"Idempotency-Key": uuid4().hex, "Content-Type": "application/json"}
        return self._answer("POST", path, data, {**own, **headers}, self.find_s if first else None)

    def get(self, path: str) -> Any:
        """Return the response's JSON. Raises Refused or ProxyUnreachable."""
        return self._answer("GET", path, None, {})

    def _answer(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], find_s: float | None = None
    ) -> Any:
        own = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        request = Request(self.url + path, data, {**own, **headers}, method=method)
        timeout_s, look_s = ANSWER_S, self.patience_s
        if find_s is not None:
            timeout_s, look_s = min(ANSWER_S, max(find_s, 0.1)), find_s

        def is_over(state: RetryCallState) -> bool:
            return (state.seconds_since_start or 0.0) >= (self.patience_s if _again(state).connected else look_s)

        tries = Retrying(retry=retry_if_exception_type(_Again), stop=is_over, wait=_wait, reraise=True)
        try:
            return tries(_send, request, timeout_s)
        except _Again as why:
            raise ProxyUnreachable(
                f"{method} {path} got no valid answer from {self.url}: {why}. If no proxy is running there, start one "
                "with `lightning-proxy serve`, or give the proxy's address (LIGHTNING_URL, or url=…)"
            ) from why


def _again(state: RetryCallState) -> _Again:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, _Again)
    return error


def _wait(state: RetryCallState) -> float:
    return max(_BACKOFF(state), _again(state).after_s)


def _send(request: Request, timeout_s: float) -> Any:
    try:
        with _opener().open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read() or b"null")
    except HTTPError as error:
        with error:
            raise _failure(error.code, error.read(), error.headers.get("Retry-After", "")) from None
    except (OSError, HTTPException, ValueError) as error:
        # What goes wrong once there is a connection is no URLError.
        connected = not isinstance(error, URLError)
        raise _Again(str(getattr(error, "reason", error)) or repr(error), connected=connected) from error


@cache
def _opener() -> OpenerDirector:
    """An opener that connects directly: an HTTP proxy named by the environment must not see a rollout's key."""
    return build_opener(ProxyHandler({}))


def _failure(status: int, raw: bytes, retry_after: str) -> Exception:
    try:
        found = json.loads(raw)["error"]
        message, param = str(found["message"]), found["param"]
    except (ValueError, TypeError, KeyError):
        message, param = raw.decode(errors="replace")[:500] or "no reason given", None
    if status in AGAIN:
        return _Again(f"{status}: {message}", float(retry_after) if retry_after.isdecimal() else 0.0)
    return Refused(status, message, param)


def answer(call: Mapping[str, Any]) -> str:
    """Return the text of a call's answer (its first choice) in any of the model APIs; "" if there is none.

    `call`: one of the calls that `GET /rollouts/{id}` returns, or that a reward function gets.
    """
    response = call.get("response")
    if not isinstance(response, dict):
        return ""
    for choice in response.get("choices") or ():
        return _text(choice["message"].get("content") if "message" in choice else choice.get("text"))
    messages = [item for item in response.get("output") or () if item.get("type") == "message"]
    return "".join(_text(item.get("content")) for item in [*messages, response])


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""
