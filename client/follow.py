"""HTTP clients that live longer than a rollout: each request belongs to the rollout of the scope that it is made in."""

from __future__ import annotations

from typing import Any

from .scope import scoped


def event_hooks(*, asynchronous: bool = False) -> dict[str, list[Any]]:
    """For `httpx.Client(event_hooks=…)`, or `asynchronous` for `httpx.AsyncClient`."""
    return {"request": [_name_later if asynchronous else _name]}


def follow(client: Any) -> Any:
    """Add the hooks to a client that is there already (once), and return it.

    An `httpx.Client` or `httpx.AsyncClient`, or a client of OpenAI's or Anthropic's, which hold one.
    """
    http = getattr(client, "_client", client) if not hasattr(client, "event_hooks") else client
    if not hasattr(http, "event_hooks"):
        raise TypeError(f"{type(client).__name__} is no httpx client, and holds none: give it `run.headers` itself")
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
