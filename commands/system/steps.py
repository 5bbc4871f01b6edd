"""Prints a running trainer's steps as they are done, and why it stands still."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ...store.opening import opened
from ...store.store import Store
from ..formats import duration
from ..show.steps import step_line
from .processes import last_line

_TRAINER = re.compile(r"\S+ [\d:,]+ (INFO|WARNING|ERROR) \S+: (.*)")  # date, time, level, module, message
log = logging.getLogger(__name__)

POLL_S = 1.0
WARNED_S, SILENT_S = 20.0, 300.0  # until a trainer that stands still is told: after a warning, after another line
# Fewer steps than these are done between two polls.
NEWEST = 20
Show = Callable[[int, Mapping[str, Any]], None]


def step_printer(console: Console) -> Show:
    """Make the function that shows a step: a coloured line on a terminal, elsewhere a line of the log."""

    def print_step(step: int, metrics: Mapping[str, Any]) -> None:
        if console.is_terminal:
            console.print(step_line(step, metrics, console.width), soft_wrap=True)
        else:
            log.info("%s", step_line(step, metrics).plain)

    return print_step


async def print_steps(config: StoreConfig, show: Show, say: Callable[[str], None]) -> None:
    """Show every step that another process finishes from now on, and say why it stops. Runs until cancelled."""
    async with opened(config) as database:
        store = Store(database)
        last, stopped = await store.steps.last(), None
        shown = last.step if last else 0
        while True:
            with suppress(StoreUnavailable):  # busy; the next poll will do
                for step in reversed(await store.steps.newest(NEWEST)):
                    if step.step > shown and "publish_s" in step.metrics:
                        show(step.step, step.metrics)
                        shown = step.step
                if stopped != (collapse := await store.steps.collapse()):
                    say(f"stopped: {collapse.story}" if collapse else "not stopped any more")
                stopped = collapse
            await asyncio.sleep(POLL_S)


async def report_standstill(trainer: Path, say: Callable[[str], None], silent_s: float = SILENT_S) -> None:
    """Say the newest line of the trainer's log once nothing else comes: a warning soon. Runs until cancelled.

    `silent_s`: until another line than a warning is said.
    """
    newest, since, is_told = ("", False), time.monotonic(), False
    while True:
        if (now := newest_of_trainer(trainer)) != newest:
            newest, since, is_told = now, time.monotonic(), False
        what, is_warning = newest
        limit = WARNED_S if is_warning else silent_s
        if not is_told and time.monotonic() - since >= limit:
            say(f"the trainer says nothing new for {duration(limit)}: {what or 'its log is empty'}; see {trainer}")
            is_told = True
        await asyncio.sleep(POLL_S)


def newest_of_trainer(log: Path) -> tuple[str, bool]:
    """Return the newest message in a trainer's log without its time, and whether it is a warning or an error."""
    line = last_line(log)
    found = _TRAINER.fullmatch(line)
    return (found[2], found[1] != "INFO") if found else (line, False)
