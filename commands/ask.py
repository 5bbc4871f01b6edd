"""One conversation with a running proxy, for the commands that look at it and steer it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..proxy.config.root import Config
from .control import ControlClient
from .signals import run_until_signal

T = TypeVar("T")


def ask(config: Config, work: Callable[[ControlClient], Awaitable[T]]) -> T:
    """Do `work` with a client of this configuration's proxy; ControlError if that is not there, or refuses."""
    api = ControlClient.of(config)

    async def run() -> T:
        async with api:
            return await work(api)

    return run_until_signal(run())


def print_json(value: Any) -> None:
    """For programs: one JSON document on one line."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
