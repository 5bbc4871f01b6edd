"""Runs an agent class of Agent Lightning 1.0 on the task of this rollout.

    lightning-proxy run --tasks FILE -- python -m lightning_proxy.client.agl agents:Chat QUESTION=input.question

The class is that of its `local.agent_class`. The variables are its `local.env_map`: each has its place in the task.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from functools import reduce
from typing import Any

from .program import task


def value_at(given: Any, path: str) -> str:
    """Return what the task has at `input.a.b`, as text or JSON. A path that does not begin so is the value itself."""
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
            raise SystemExit(f"{variable}={path}: the task has no such place") from None
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
