"""`up`: the system until Ctrl-C, shown live on a terminal, as lines with times elsewhere, or as JSON."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live

from ...core.config.root import Config
from ...core.json_text import dumps_readable
from ...store.sqlite.file import lock_file
from ...trainer.plan import make_plan
from ..formats import address, plain
from ..lines import LogFormat, time_format
from ..plan import plan_tables
from ..put_back import put_back_left
from ..show.steps import step_line
from ..vllm import without_tools
from .processes import STILL, WAITING, last_line
from .steps import print_steps, report_standstill
from .system import Launch, running_system

POLL_S = 0.5
DATE = re.compile(r"^\d{4}-\d\d-\d\d (?=\d\d:)")


async def up(config: Config, launch: Launch, logs: Path, console: Console, log_format: LogFormat = "text") -> None:
    """Run vLLM, proxy and trainer until cancelled or until vLLM or the proxy is lost; show their calls and steps."""
    plan = make_plan(config)
    if plan.cards and log_format == "text":
        console.print(*plan_tables(plan), sep="\n")
    with UpView(console, logs, log_format) as view:
        if warning := without_tools(config):
            view.say(warning, "yellow")
        await put_back_left(config, view.say)
        parts = running_system(config, launch, logs, view.say, trains=True, serve_options=view.serve_options)
        async with AsyncExitStack() as stack:
            if not config.store.is_postgres:  # the lock tells other commands why the proxy is not there yet
                config.store.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock_file(config.store.path, "up"))
            system = await stack.enter_async_context(parts)
            root = f"http://{address(config.proxy.host, config.proxy.port)}"
            ready = f"ready: OPENAI_BASE_URL={root}/v1, model {config.policy.alias!r}; logs in {logs}/; Ctrl-C stops"
            view.say(ready, "bold")
            view.say(f"look at it in a browser: {root}/")
            await system.guard(_show(config, logs, view))


async def _show(config: Config, logs: Path, view: UpView) -> None:
    say = partial(view.say, style="red")
    steps = print_steps(config.store, view.step, say)
    standing = report_standstill(logs / "trainer.log", say, math.inf)  # without rollouts it says nothing
    await asyncio.gather(view.follow(logs / "proxy.log"), steps, standing)


class UpView:
    """`with UpView(console, logs, format) as view:` shows parts that are starting with the time so far.

    On a terminal this is one line that changes, with the newest line of the part's log.
    """

    def __init__(self, console: Console, logs: Path, format: LogFormat = "text") -> None:
        self.console, self._logs, self._format = console, logs, format
        self._is_live = console.is_terminal and format == "text"
        self._time = time_format(self._is_live)
        self._waits: tuple[str, float] | None = None  # for which part, and since when
        self._line = Live(get_renderable=self._starting, console=console, transient=True, refresh_per_second=2)

    def _starting(self) -> RenderableType:
        if self._waits is None:
            return Group()
        part, since = self._waits
        took = timedelta(seconds=int(time.monotonic() - since))
        line = plain(f"{WAITING}{part} {took} {last_line(self._logs / f'{part}.log')}", "dim")
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    @property
    def serve_options(self) -> tuple[str, ...]:
        """The options of the proxy, whose lines are shown here."""
        return ("--log-format", self._format, *(["--calls"] if self._is_live else []))

    def __enter__(self) -> UpView:
        if self._is_live:
            self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._line.stop()

    def say(self, what: str, style: str = "dim") -> None:
        """Show a line of any text."""
        if self._is_live:
            if what.startswith(STILL):  # its line shows it all the time
                return
            waits = what.startswith(WAITING)
            self._waits = (what.removeprefix(WAITING), time.monotonic()) if waits else None
            if waits:
                return
        self._print(what, style, event="up")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a step that is done."""
        if self._format == "json":
            self._print(step_line(step, metrics).plain, event="step", step=step, metrics=dict(metrics))
        else:
            line = step_line(step, metrics, self.console.width - len("00:00:00 ") if self._is_live else None)
            self.console.print(plain(time.strftime(f"{self._time} "), "dim") + line, soft_wrap=True)

    async def follow(self, log: Path) -> None:
        """Show the lines that are added to a log, until cancelled. They have their own times."""
        size, rest = log.stat().st_size, b""
        while True:
            await asyncio.sleep(POLL_S)
            if log.exists() and log.stat().st_size < size:  # it was begun anew
                size, rest = 0, b""
            with log.open("rb") as file:
                file.seek(size)
                *lines, rest = (rest + file.read()).split(b"\n")
                size = file.tell()
            for line in lines:
                text = line.decode(errors="replace")
                shown = DATE.sub("", text) if self._is_live else text
                self.console.print(plain(shown), soft_wrap=True, highlight=False)

    def _print(self, what: str, style: str = "", **fields: Any) -> None:
        line, shown_style = f"{time.strftime(self._time)} {what}", style
        if self._format == "json":
            at = datetime.now().astimezone().isoformat(timespec="milliseconds")
            line, shown_style = dumps_readable({"time": at, "level": "info", "message": what, **fields}), ""
        self.console.print(plain(line, shown_style), soft_wrap=True, highlight=False)
