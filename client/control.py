"""Posts to the proxy's control API, retries until it answers, and reads answers. Standard library and tenacity only."""

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

from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type, stop_after_delay, stop_any
from tenacity.stop import stop_base
from tenacity.wait import wait_random_exponential

from .errors import ClientError, ProxyUnreachable, Refused

ANSWER_S = 30.0  # timeout of one try
PATIENCE_S = 60.0
FIND_S = 5.0  # how long to look for a proxy that was never there, unless a patience is given
AGAIN = frozenset({408, 429, 502, 503, 504})
_BACKOFF = wait_random_exponential(multiplier=0.1, max=10)


class _Again(Exception):
    """This try failed, but the next may succeed. `after_s` is the wait that the proxy asked for.

    `connected`: something answered at its address.
    """

    def __init__(self, why: str, after_s: float = 0.0, *, connected: bool = True) -> None:
        super().__init__(why)
        self.after_s = after_s
        self.connected = connected


class _NothingThere(stop_after_delay):
    """Stop after this time if nothing answers at the address."""

    def __call__(self, retry_state: RetryCallState) -> bool:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        return isinstance(error, _Again) and not error.connected and super().__call__(retry_state)


@dataclass(frozen=True, slots=True)
class Control:
    """The control API of the proxy at `url`. A request is retried for up to `patience_s` seconds.

    `find_s`: how long `find` looks for something that listens there.
    """

    url: str
    api_key: str | None = None
    patience_s: float = PATIENCE_S
    find_s: float = PATIENCE_S

    def post(self, path: str, body: Any, headers: Mapping[str, str]) -> Any:
        """Post and return the answer's JSON. A retry counts once. Raises Refused or ProxyUnreachable."""
        return self._patiently(self._request(path, body, headers), f"so this was not recorded: POST {path}")

    def get(self, path: str, headers: Mapping[str, str]) -> Any:
        """Return the answer's JSON. Raises Refused or ProxyUnreachable."""
        return self._patiently(Request(self.url + path, headers={**self._authorization(), **headers}), f"GET {path}")

    def _patiently(self, request: Request, what: str) -> Any:
        try:
            return _tries(stop_after_delay(self.patience_s))(_send, request)
        except RetryError as error:
            why = error.last_attempt.exception()
            raise ProxyUnreachable(
                f"the proxy at {self.url} could not be reached for {self.patience_s:g} s, {what}: {why}"
            ) from why

    def find(self, path: str, body: Any, headers: Mapping[str, str]) -> Any:
        """Post like `post`, as the first request to the proxy: give up after `find_s` if nothing listens."""
        request = self._request(path, body, headers)
        tries = _tries(stop_any(stop_after_delay(self.patience_s), _NothingThere(self.find_s)))
        try:
            return tries(_send, request, min(ANSWER_S, max(self.find_s, 0.1)))
        except RetryError as error:
            why = error.last_attempt.exception()
            raise ProxyUnreachable(
                f"no proxy answers at {self.url} ({why}): start it with `lightning-proxy serve`, or say where it is "
                f"(LIGHTNING_URL, or url=…)"
            ) from why

    def _request(self, path: str, body: Any, headers: Mapping[str, str]) -> Request:
        own = self._authorization() | {"Idempotency-Key": uuid4().hex, "Content-Type": "application/json"}
        return Request(self.url + path, _encode(body), {**own, **headers}, method="POST")

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def _tries(stop: stop_base) -> Retrying:
    return Retrying(retry=retry_if_exception_type(_Again), stop=stop, wait=_wait, reraise=False)


def _encode(body: Any) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ClientError(f"this cannot be sent as JSON: {error}") from None


def _send(request: Request, timeout_s: float = ANSWER_S) -> Any:
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
    """Connects to the proxy directly: an HTTP proxy named by the environment must not see a rollout's key."""
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


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return max(_BACKOFF(state), error.after_s if isinstance(error, _Again) else 0.0)


def answer(call: Mapping[str, Any]) -> str:
    """Return the text of a call's answer by chat, completions, Responses or Messages; "" if it has none.

    `call` is one of the calls of `GET /rollouts/{id}`, which a reward function gets, too.
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
