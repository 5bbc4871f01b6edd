"""Agent Lightning's emitters (`from lightning_proxy.client import agl`), and a command that runs its agent classes.

    lightning-proxy run --tasks FILE -- python -m lightning_proxy.client.agl agents:Chat QUESTION=input.question

`agents:Chat` is what Agent Lightning 1.0 calls `local.agent_class`. `QUESTION=…` is an entry of its `local.env_map`: it
sets a variable to the task's value at a path, or to a fixed text. The emitters are those of 0.2 and 0.3.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from .program import task
from .scope import current, emit_note

Attributes = Mapping[str, Any] | None


def emit_reward(
    reward: float | Mapping[str, float], *, primary_key: str | None = None, attributes: Attributes = None
) -> None:
    """Reward the rollout and end it. Of several rewards, the one at `primary_key` is posted under the name `reward`."""
    values = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
    primary = primary_key if isinstance(reward, Mapping) else "reward"
    if primary not in values:
        raise ValueError(f"primary_key must be one of {list(values)}; got {primary_key!r}")
    here, comment = current(), json.dumps(attributes, default=repr) if attributes else None
    main = values.pop(primary)
    for name, value in values.items():
        here.reward(value, name=name, final=False, comment=comment, source="agl")
    here.reward(main, comment=comment, source="agl")


def emit_message(message: str, attributes: Attributes = None) -> None:
    """Record a text with the rollout."""
    _note("message", message, attributes)


def emit_object(object: Any, attributes: Attributes = None) -> None:
    """Record a value with the rollout, as JSON. Values that have no JSON form are recorded as their `repr`."""
    _note("object", object, attributes)


def emit_annotation(annotation: Mapping[str, Any]) -> None:
    """Record named values with the rollout."""
    _note("annotation", annotation)


def emit_exception(exception: BaseException, attributes: Attributes = None) -> None:
    """Record an exception and its traceback with the rollout."""
    text = "".join(traceback.format_exception(exception))
    found = {"type": type(exception).__name__, "message": str(exception), "stacktrace": text}
    _note("exception", {f"exception.{name}": value for name, value in found.items()}, attributes)


def _note(name: str, value: Any, attributes: Attributes = None) -> None:
    found = {"value": value, "attributes": attributes} if attributes else value
    emit_note(json.loads(json.dumps(found, default=repr)), name=name)


def value_at(given: Any, path: str) -> str:
    """Return the task's value at a path such as `input.a.b`, as text or JSON. Any other text is returned unchanged."""
    first, *places = path.split(".")
    if first != "input" or (not places and path != "input"):
        return path
    value = reduce(lambda inner, at: inner[int(at) if isinstance(inner, list) else at], places, given)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def main(arguments: Sequence[str]) -> None:
    name, *variables = arguments
    given = task()
    for variable, _, path in (one.partition("=") for one in variables):
        try:
            os.environ[variable] = value_at(given, path)
        except (KeyError, IndexError, ValueError, TypeError):
            raise SystemExit(f"{variable}={path}: the task has no field at that path") from None
    module, _, kind = name.partition(":") if ":" in name else name.rpartition(".")
    result = getattr(importlib.import_module(module), kind)().run()
    if inspect.isawaitable(result):
        asyncio.run(_finished(result))


async def _finished(result: Any) -> None:
    await result


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m lightning_proxy.client.agl MODULE:CLASS [VARIABLE=input.PLACE …]")
    main(sys.argv[1:])
