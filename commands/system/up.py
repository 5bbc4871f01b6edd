"""`up`: runs the whole system until Ctrl-C, and shows its calls, its steps and the messages of its parts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config.root import Config
from ...trainer.plan import make_plan
from ..formats import address, plain
from ..lines import time_format
from ..plan import plan_tables
from ..put_back import put_back_left
from ..show.steps import step_line
from ..vllm import without_tools
from .steps import print_steps, say_warnings
from .system import Launch, running_system

POLL_S = 0.5
DATE = re.compile(r"^\d{4}-\d\d-\d\d (?=\d\d:)")


async def up(config: Config, launch: Launch, logs: Path, console: Console) -> None:
    """Run vLLM, proxy and trainer, and show what they do, until cancelled. Raises ChildDied if one is lost for good."""
    plan = make_plan(config)
    if plan.cards:
        console.print(*plan_tables(plan), sep="\n")
    view = UpView(console)
    if warning := without_tools(config):
        view.say(warning, "yellow")
    await put_back_left(config, view.say)
    async with running_system(config, launch, logs, view.say, trains=True) as system:
        root = f"http://{address(config.proxy.host, config.proxy.port)}"
        ready = f"ready: OPENAI_BASE_URL={root}/v1, model {config.policy.alias!r}; logs in {logs}/; Ctrl-C stops"
        view.say(ready, "bold")
        view.say(f"look at it in a browser: {root}/")
        await system.guard(_show(config, logs, view))


async def _show(config: Config, logs: Path, view: UpView) -> None:
    say = partial(view.say, style="red")
    steps = print_steps(config.store, view.step, say)
    await asyncio.gather(view.follow(logs / "proxy.log"), steps, say_warnings(logs / "trainer.log", say))


class UpView:
    """Shows lines with their times; on a terminal, without dates."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._time = time_format(console.is_terminal)

    def say(self, what: str, style: str = "dim") -> None:
        line = plain(f"{time.strftime(self._time)} {what}", style)
        self.console.print(line, soft_wrap=True, highlight=False)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        width = self.console.width - len("00:00:00 ") if self.console.is_terminal else None
        self.console.print(
            plain(time.strftime(f"{self._time} "), "dim") + step_line(step, metrics, width), soft_wrap=True
        )

    async def follow(self, log: Path) -> None:
        """Show the lines that are added to a log, until cancelled."""
        size, rest = log.stat().st_size, b""
        while True:
            await asyncio.sleep(POLL_S)
            if log.exists() and log.stat().st_size < size:  # it was begun again
                size, rest = 0, b""
            with log.open("rb") as file:
                file.seek(size)
                *lines, rest = (rest + file.read()).split(b"\n")
                size = file.tell()
            for line in lines:
                text = line.decode(errors="replace")
                shown = DATE.sub("", text) if self.console.is_terminal else text
                self.console.print(plain(shown), soft_wrap=True, highlight=False)
