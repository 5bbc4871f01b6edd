"""Shows the output of `up`: a live view on a terminal, lines with times elsewhere, or JSON."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ...core.json_text import dumps_readable
from ..formats import plain
from ..lines import LogFormat, time_format
from ..show.steps import step_line
from .processes import STILL, WAITING
from .reason import last_line

POLL_S = 0.5
DATE = re.compile(r"^\d{4}-\d\d-\d\d (?=\d\d:)")


class UpView:
    """`with UpView(console, logs, format) as view:` shows parts that are starting with the time so far.

    On a terminal this is one line that changes, with the newest line of the part's log.
    """

    def __init__(self, console: Console, logs: Path, format: LogFormat = "text") -> None:
        self.console, self._format = console, format
        self._is_live = console.is_terminal and format == "text"
        self._time = time_format(self._is_live)
        columns = (
            SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), _LastLine(logs)
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, transient=True, expand=True, disable=not self._is_live)

    @property
    def serve_options(self) -> tuple[str, ...]:
        """The options of the proxy, whose lines are shown here."""
        return ("--log-format", self._format, *(["--calls"] if self._is_live else []))

    def __enter__(self) -> UpView:
        if self._is_live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._progress.stop()

    def say(self, what: str, style: str = "dim") -> None:
        """Show a line of any text."""
        if self._is_live:
            if what.startswith(STILL):  # its line shows it all the time
                return
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            if what.startswith(WAITING):
                self._progress.add_task(what, part=what.removeprefix(WAITING))
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
        size, rest = log.stat().st_size, ""
        while True:
            await asyncio.sleep(POLL_S)
            now = log.stat().st_size if log.exists() else 0
            if now < size:  # it was begun anew
                size, rest = 0, ""
            with log.open("rb") as file:
                file.seek(size)
                added = file.read()
                size = file.tell()
            *lines, rest = (rest + added.decode(errors="replace")).split("\n")
            for line in lines:
                shown = DATE.sub("", line) if self._is_live else line
                self.console.print(plain(shown), soft_wrap=True, highlight=False)

    def _print(self, what: str, style: str = "", **fields: Any) -> None:
        if self._format == "json":
            at = datetime.now().astimezone().isoformat(timespec="milliseconds")
            line = dumps_readable({"time": at, "level": "info", "message": what, **fields})
            self.console.print(plain(line), soft_wrap=True, highlight=False)
        else:
            self.console.print(plain(f"{time.strftime(self._time)} {what}", style), soft_wrap=True, highlight=False)


class _LastLine(ProgressColumn):
    """The newest line of the log of a part that is starting, as much of it as there is room for."""

    max_refresh = POLL_S

    def __init__(self, logs: Path) -> None:
        super().__init__(Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        self._logs = logs

    def render(self, task: Task) -> Text:
        return plain(last_line(self._logs / f"{task.fields['part']}.log"), "dim")
