"""What the demo shows while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..run.run import RolloutResult

NEWEST = 64


@dataclass
class DemoState:
    """What is known of the running demo. `rewards`: of the training rollouts, in the order in which they ended."""

    steps: int
    phase: str = "starting"
    step: int = 0
    version: int = 0
    evaluated: int = 0
    failed: int = 0
    rewards: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def add(self, result: RolloutResult) -> None:
        """A training rollout ended."""
        self.failed += result.failed
        if result.reward is not None:
            self.rewards.append(result.reward)

    def add_evaluated(self, result: RolloutResult) -> None:
        self.evaluated += 1
        self.failed += result.failed

    def take(self, policy: dict[str, Any]) -> None:
        """An answer of GET /policy."""
        self.step, self.version = policy["steps"], policy["live_version"]

    def mean(self) -> float | None:
        """The mean reward of the newest training rollouts."""
        newest = self.rewards[-NEWEST:]
        return sum(newest) / len(newest) if newest else None


class DemoView:
    """Draws the state anew twice a second; on a terminal in place, elsewhere a line when the phase or step changes."""

    def __init__(self, state: DemoState, console: Console) -> None:
        self._state, self._console = state, console
        self._said: tuple[str, int] | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=2, transient=True):
            yield

    def changed(self) -> None:
        """For outputs that are no terminal."""
        state = self._state
        if self._console.is_terminal or self._said == (state.phase, state.step):
            return
        self._said = (state.phase, state.step)
        self._console.print("  ".join(f"{name} {value}" for name, value in self._facts()), markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, value in self._facts():
            table.add_row(f"[dim]{name}[/]", value)
        return table

    def _facts(self) -> list[tuple[str, str]]:
        state, mean = self._state, self._state.mean()
        return [
            ("elapsed", f"{int(state.elapsed) // 60}:{int(state.elapsed) % 60:02d}"),
            ("phase", state.phase),
            ("step", f"{state.step}/{state.steps}"),
            ("policy version", str(state.version)),
            ("rollouts", f"{len(state.rewards)} + {state.evaluated} evaluated, {state.failed} failed"),
            (f"reward of the newest {NEWEST}", "-" if mean is None else f"{mean:.3f}"),
        ]
