"""The current rollout of an asyncio task or thread, and functions that emit rewards and events for it.

Each `emit_…` returns once its reward or event is recorded. In asyncio use `await asyncio.to_thread(emit_…, …)`.
All may raise NoRollout, Refused or ProxyUnreachable, and ClientError for a value that has no JSON form.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal
from urllib.parse import quote
from uuid import uuid4

from .control import FIND_S, PATIENCE_S, Control
from .program import ClientError, NoRollout, Refused, names_of, reached_directly

DEFAULT_URL = "http://127.0.0.1:8080"
CONFLICT = 409
REASON_CHARACTERS = 2000

Mode = Literal["train", "eval"]

_current: ContextVar[Rollout | None] = ContextVar("lightning_proxy.client.rollout", default=None)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of the agent on one task, at the proxy that `control` talks to."""

    control: Control = field(repr=False)
    rollout_id: str
    task_id: str | None = None
    agent: str | None = None
    mode: Mode | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that name the rollout in a request to the proxy."""
        names = {"X-Task-Id": self.task_id, "X-Agent-Name": self.agent, "X-Rollout-Mode": self.mode}
        return {"X-Rollout-Id": self.rollout_id} | {name: value for name, value in names.items() if value is not None}

    @property
    def base_url(self) -> str:
        """A base URL that names rollout, task and agent, for programs that accept only a URL."""
        task = "" if self.task_id is None else f"/tasks/{quote(self.task_id, safe=':')}"
        agent = "" if self.agent is None else f"/agents/{quote(self.agent, safe=':')}"
        return f"{self.control.url}/rollouts/{quote(self.rollout_id, safe=':')}{task}{agent}/v1"

    @property
    def environ(self) -> dict[str, str]:
        """The variables for a program that the agent starts: `subprocess.run(…, env=os.environ | run.environ)`."""
        found = names_of(self.control.url, self.base_url, self._key, self.rollout_id)
        found |= {"LIGHTNING_API_KEY": self.control.api_key} if self.control.api_key else {}
        return reached_directly(found, os.environ)

    def openai(self, **options: Any) -> Any:
        """Return an `openai.OpenAI` client for calls that belong to the rollout."""
        from openai import DefaultHttpxClient, OpenAI

        return OpenAI(**{"http_client": DefaultHttpxClient(trust_env=False), **self._options(options)})

    def async_openai(self, **options: Any) -> Any:
        """Return an `openai.AsyncOpenAI` client for calls that belong to the rollout."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        return AsyncOpenAI(**{"http_client": DefaultAsyncHttpxClient(trust_env=False), **self._options(options)})

    def using(self, client: Any) -> Any:
        """A copy of an OpenAI or Anthropic client for calls that belong to the rollout. It shares the connections.

        The client must already talk to the proxy.
        """
        return client.with_options(default_headers=self.headers)

    def as_agent(self, name: str) -> Rollout:
        """The same rollout, for another of its agents."""
        return replace(self, agent=name)

    def open(self) -> None:
        """Open the rollout at the proxy with its task and mode, before its first call."""
        self.control.post(self._path("events"), [], self.headers, first=True)

    def reward(
        self,
        value: float,
        *,
        name: str = "reward",
        call_id: str | None = None,
        final: bool | None = None,
        comment: str | None = None,
        source: str | None = None,
        retrain: bool = False,
    ) -> int:
        """Post a reward, with the fields of POST /reward, and return its id."""
        if isinstance(value, Real) and not isinstance(value, int):
            value = float(value)  # JSON knows no numpy numbers; a boolean is left for the proxy to refuse
        body = {"rollout_id": self.rollout_id, "reward": value, "call_id": call_id, "name": name, "final": final}
        answer = self.control.post("/reward", body | {"comment": comment, "source": source, "retrain": retrain}, {})
        return int(answer["reward_id"])

    def event(self, kind: Literal["state", "action", "note"], **content: Any) -> int:
        """Post an event that is not a call, and return its id."""
        body = {"kind": kind, "agent": self.agent, **content}
        return int(self.control.post(self._path("events"), body, self.headers)["event_id"])

    def end(self, status: Literal["completed", "failed", "discarded"] = "completed", reason: str | None = None) -> None:
        """End the rollout. A rollout that has already ended is not changed."""
        try:
            self.control.post(self._path("end"), {"status": status, "reason": reason}, {})
        except Refused as error:
            if error.status != CONFLICT:
                raise

    @property
    def _key(self) -> str:
        return self.control.api_key or "unused"

    def _path(self, route: str) -> str:
        return f"/rollouts/{quote(self.rollout_id, safe=':')}/{route}"

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        headers = {**self.headers, **(given.get("default_headers") or {})}
        return {"base_url": f"{self.control.url}/v1", "api_key": self._key, **given, "default_headers": headers}


def current() -> Rollout:
    """The rollout of the innermost scope, or else the one that `lightning-proxy run` started this program for.

    Raises NoRollout if there is neither. A new thread begins outside any scope; `asyncio.to_thread` passes it on.
    """
    found = scoped()
    if found is None:
        raise NoRollout(
            "there is no rollout here: call this within `with client.rollout(…):`, or start the program with "
            "`lightning-proxy run`. A new thread does not inherit its parent's rollout: pass it on"
        )
    return found


def scoped() -> Rollout | None:
    """Like `current`, but None if there is no rollout."""
    return _current.get() or (rollout()._rollout if "LIGHTNING_ROLLOUT_ID" in os.environ else None)


class rollout:
    """A scope (`with` or `async with`) whose events, and calls by clients given to `follow`, belong to one rollout.

    It opens the rollout at the proxy and ends it as completed, or as failed if an exception leaves the scope.
    With `end=False` the rollout stays open, for somebody else to end or reward. `rollout_id`, `url` and `api_key`
    default to the variables that `lightning-proxy run` sets, or else to a new id, port 8080 on this machine and no key.
    If no proxy listens there, opening fails within seconds, or after `patience_s` if it is given.
    """

    def __init__(
        self,
        rollout_id: str | None = None,
        *,
        task_id: str | None = None,
        agent: str | None = None,
        mode: Mode | None = None,
        url: str | None = None,
        api_key: str | None = None,
        end: bool = True,
        patience_s: float | None = None,
    ) -> None:
        env = os.environ.get
        control = Control(
            (url or env("LIGHTNING_URL") or DEFAULT_URL).rstrip("/"),
            api_key or env("LIGHTNING_API_KEY") or env("OPENAI_API_KEY"),
            PATIENCE_S if patience_s is None else patience_s,
            FIND_S if patience_s is None else patience_s,
        )
        name = rollout_id or env("LIGHTNING_ROLLOUT_ID") or uuid4().hex
        self._rollout = Rollout(control, name, task_id, agent, mode)
        self._ends = end
        self._token: Token[Rollout | None] | None = None

    def __enter__(self) -> Rollout:
        self._rollout.open()
        self._token = _current.set(self._rollout)
        return self._rollout

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave()
        self._end(error)

    async def __aenter__(self) -> Rollout:
        await asyncio.to_thread(self._rollout.open)
        self._token = _current.set(self._rollout)
        return self._rollout

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave()
        await asyncio.to_thread(self._end, error)

    def _leave(self) -> None:
        assert self._token is not None
        with suppress(ValueError):  # the scope was left in another context, where nothing is set
            _current.reset(self._token)

    def _end(self, error: BaseException | None) -> None:
        if not self._ends:
            return
        if error is None:
            self._rollout.end()
            return
        with suppress(ClientError):  # the caller must see the agent's own error
            self._rollout.end("failed", f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])


@contextmanager
def agent(name: str) -> Iterator[Rollout]:
    """A scope for one agent within the current rollout. Raises NoRollout if there is none."""
    inner = current().as_agent(name)
    token = _current.set(inner)
    try:
        yield inner
    finally:
        _current.reset(token)


def emit_reward(
    value: float,
    *,
    name: str = "reward",
    call_id: str | None = None,
    final: bool | None = None,
    comment: str | None = None,
    source: str | None = None,
) -> int:
    """Reward the rollout, and end it unless `final` is False.

    With `call_id` (X-Call-Id), reward only that call; then the rollout ends only if `final` is True.
    """
    return current().reward(value, name=name, call_id=call_id, final=final, comment=comment, source=source)


def emit_state(value: Any, *, name: str | None = None) -> int:
    """Record the agent's state (any JSON value). It becomes the `state` of the actions that this agent emits next."""
    return current().event("state", value=value, name=name)


def emit_action(name: str, arguments: Any = None, result: Any = None, *, is_error: bool = False) -> int:
    """Record an action that no model chose, such as a retrieval, and its result, as a tool transition."""
    return current().event("action", name=name, arguments=arguments, result=result, is_error=is_error)


def emit_note(value: Any, *, name: str | None = None) -> int:
    """Record any JSON value with the rollout."""
    return current().event("note", value=value, name=name)


def follow(client: Any) -> Any:
    """Make a client name the current rollout in each of its requests, and return the client.

    The client is an `httpx.Client`, an `httpx.AsyncClient`, or an OpenAI or Anthropic client. Others raise TypeError.
    """
    http = getattr(client, "_client", client) if not hasattr(client, "event_hooks") else client
    if not hasattr(http, "event_hooks"):
        raise TypeError(
            f"{type(client).__name__} is not an httpx client and has none inside: send `run.headers` with its requests"
        )
    hook = _name_later if hasattr(http, "aclose") else _name
    hooks = http.event_hooks
    if hook not in hooks["request"]:
        http.event_hooks = hooks | {"request": [*hooks["request"], hook]}
    return client


def _name(request: Any) -> None:
    rollout = scoped()
    for name, value in rollout.headers.items() if rollout else ():
        request.headers.setdefault(name, value)


async def _name_later(request: Any) -> None:
    _name(request)
