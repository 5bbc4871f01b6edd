"""Prints a running trainer's steps as they finish, and its warnings."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ...store.opening import opened
from ...store.store import Store
from ..show.steps import step_line

WARNING = re.compile(r"\S+ [\d:,]+ (?:WARNING|ERROR) \S+: (.*)\n")  # date, time, level, module, message
log = logging.getLogger(__name__)

POLL_S = 1.0
# Fewer steps than these are done between two polls.
NEWEST = 20
Show = Callable[[int, Mapping[str, Any]], None]


def step_printer(console: Console) -> Show:
    """Return a function that shows a step: as a coloured line on a terminal, otherwise as a log line."""

    def print_step(step: int, metrics: Mapping[str, Any]) -> None:
        if console.is_terminal:
            console.print(step_line(step, metrics, console.width), soft_wrap=True)
        else:
            log.info("%s", step_line(step, metrics).plain)

    return print_step


async def print_steps(config: StoreConfig, show: Show, say: Callable[[str], None]) -> None:
    """Show each step that a trainer finishes from now on, and say why training stops. Runs until cancelled."""
    async with opened(config) as database:
        store = Store(database)
        last, stopped, seen = await store.steps.last(), None, None
        shown = last.step if last else 0
        while True:
            with suppress(StoreUnavailable):  # busy; the next poll will do
                for step in reversed(await store.steps.newest(NEWEST)):
                    if step.step > shown and "publish_s" in step.metrics:
                        show(step.step, step.metrics)
                        shown = step.step
                collapse = await store.steps.collapse()
                if stopped != collapse == seen:  # a rollback ends it at once
                    say(f"stopped: {collapse.story}" if collapse else "no longer stopped")
                    stopped = collapse
                seen = collapse
            await asyncio.sleep(POLL_S)


async def say_warnings(trainer: Path, say: Callable[[str], None]) -> None:
    """Print each distinct warning and error in a trainer's log once. Runs until cancelled."""
    said = set[str]()
    with trainer.open("rb") as log:
        while True:
            while (line := log.readline()).endswith(b"\n"):
                if (found := WARNING.fullmatch(line.decode(errors="replace"))) and found[1] not in said:
                    said.add(found[1])
                    say(f"trainer: {found[1]}")
            log.seek(-len(line), os.SEEK_CUR)  # it is not whole yet
            await asyncio.sleep(POLL_S)
