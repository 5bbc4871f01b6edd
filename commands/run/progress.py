"""Shows progress to a person while agents work: bars on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from .run import RolloutResult

LINE_EVERY_S = 10.0


class ProgressView:
    """`with ProgressView(console) as view:` shows the bars that `view.bar` makes, and `view.say` prints above them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        name = Column(max_width=22, no_wrap=True)  # all of it fits 80 columns
        columns = (
            TextColumn("{task.description}", markup=False, table_column=name), BarColumn(14), MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"), TextColumn("failed {task.fields[failed]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bars: list[Bar] = []

    def bar(self, label: str, total: int) -> Bar:
        self._bars.append(Bar(self, label, total))
        return self._bars[-1]

    def say(self, what: str) -> None:
        self.console.print(what, style="dim", markup=False, highlight=False)

    def __enter__(self) -> ProgressView:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        for bar in self._bars:
            bar.tell()


class Bar:
    """Shows how far one piece of work is. `add` counts rollouts; `show` sets a count made elsewhere."""

    def __init__(self, view: ProgressView, label: str, total: int) -> None:
        self._view, self.label, self._total = view, label, total
        self._bar = view.progress.add_task(label, total=total, reward="-", failed=0)
        self._started = self._printed_at = time.monotonic()
        self._done = self._printed = self._failed = self._rewarded = 0
        self._reward, self._mean = 0.0, "-"

    def add(self, result: RolloutResult) -> None:
        if result.reward is not None:
            self._rewarded += 1
            self._reward += result.reward
        mean = self._reward / self._rewarded if self._rewarded else None
        self.show(self._done + 1, mean, self._failed + result.failed)

    def show(self, done: int, mean_reward: float | None, failed: int) -> None:
        self._done, self._failed = done, failed
        self._mean = "-" if mean_reward is None else f"{mean_reward:.3f}"
        self._view.progress.update(self._bar, completed=done, reward=self._mean, failed=failed)
        if done == self._total or time.monotonic() - self._printed_at > LINE_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Print the progress where no bar shows it, unless it was just printed."""
        if self._view.console.is_terminal or self._done == self._printed:
            return
        self._printed, self._printed_at = self._done, time.monotonic()
        elapsed = timedelta(seconds=int(self._printed_at - self._started))
        line = f"{self.label} {self._done}/{self._total}  reward {self._mean}  failed {self._failed}  {elapsed}"
        self._view.console.print(line, markup=False, highlight=False, soft_wrap=True)
