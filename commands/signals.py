"""Ctrl-C and SIGTERM end a command by cancelling it, so that its clean-up runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..core.errors import LightningError

T = TypeVar("T")


class Interrupted(LightningError):
    """The user or the system asked the command to stop, and everything that it started has stopped."""

    exit_code = 130


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end. On SIGINT or SIGTERM cancel it once, let it clean up, and raise Interrupted."""
    return asyncio.run(_run(work))


async def _run(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        # Only once: a second Ctrl-C must not cut the clean-up short and leave processes behind.
        if not received:
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted("stopped") from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
