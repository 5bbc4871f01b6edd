"""The lessons of a run of fine-tuning: rows, or pairs of them, or rows with thumbs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...trainer.report.batch_metrics import Seen
from ...trainer.types import Sample

# A lesson: a row, or a tuple with rows in it. The first is of an answer that is to become likelier, if any is.
T = TypeVar("T", bound=Sample | tuple[Any, ...])


@dataclass(frozen=True)
class Lessons(Generic[T]):
    """Lessons to learn from, and lessons of other tasks to measure on; `metrics` counts how they came about."""

    train: tuple[T, ...]
    held_out: tuple[T, ...]
    metrics: dict[str, float]

    @property
    def rows(self) -> list[Sample]:
        """Return all rows to learn from."""
        return [row for one in self.train for row in rows_of(one)]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Return rows whose prompts vLLM answers when the new weights are verified: the first of each lesson."""
        return tuple(rows_of(one)[0] for one in self.train)

    @property
    def rollout_ids(self) -> list[str]:
        return list(dict.fromkeys(row.rollout_id for one in (*self.train, *self.held_out) for row in rows_of(one)))

    @property
    def digest(self) -> str:
        """Return a digest that is equal for two exactly if they have the same lessons."""
        shown = [[_shown(one) for one in part] for part in (self.train, self.held_out)]
        return hashlib.sha256(repr(shown).encode()).hexdigest()


def rows_of(lesson: Sample | tuple[Any, ...]) -> list[Sample]:
    """Return the rows in a lesson."""
    return [part for part in _parts(lesson) if isinstance(part, Sample)]


def lessons_of(tasks: Sequence[Sequence[T]], held_out: float, seen: Seen, **counts: float) -> Lessons[T]:
    """Return the lessons of tasks, of which the first are only measured on: a share of `held_out`.

    A rollout without a task is learned from or measured on by itself, and is no group.
    """
    held = int(held_out * len(tasks))
    measured, learned = tasks[:held], tasks[held:]
    train, rest = (tuple(one for task in part for one in task) for part in (learned, measured))
    rows = [row for one in train for row in rows_of(one)]
    metrics = seen.metrics() | counts | {
        "groups": float(seen.groups),
        "groups_trained": _groups(learned),
        "groups_held_out": _groups(measured),
        "rollouts_trained": float(len({row.rollout_id for row in rows})),
        "samples": float(len(rows)),
    }  # fmt: skip
    return Lessons(train, rest, metrics)


def _groups(tasks: Sequence[Sequence[Sample | tuple[Any, ...]]]) -> float:
    firsts = [rows_of(task[0])[0] for task in tasks]
    return float(sum(row.task_id != row.rollout_id for row in firsts))


def _parts(lesson: Sample | tuple[Any, ...]) -> tuple[Any, ...]:
    return (lesson,) if isinstance(lesson, Sample) else lesson


def _shown(lesson: Sample | tuple[Any, ...]) -> list[Any]:
    parts = _parts(lesson)
    return [(one.rollout_id, one.token_ids, one.mask) if isinstance(one, Sample) else one for one in parts]
