"""One conversation with a running proxy, for the commands that look at it and steer it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lightning_proxy.commands.control import ControlClient, ControlError
from lightning_proxy.commands.signals import run_until_signal
from lightning_proxy.proxy.config import Config
from lightning_proxy.proxy.errors import LightningError

T = TypeVar("T")


def ask(config: Config, work: Callable[[ControlClient], Awaitable[T]]) -> T:
    """Do `work` with a client of this configuration's proxy; one line says what to start if it is not there."""
    api = ControlClient.of(config)

    async def run() -> T:
        async with api:
            return await work(api)

    try:
        return run_until_signal(run())
    except ControlError as error:
        if error.status_code is not None:
            raise
        raise LightningError(f"no proxy answers at {api.url}; start it with `lightning-proxy serve`") from None


def print_json(value: Any) -> None:
    """For programs: one JSON document on one line."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
