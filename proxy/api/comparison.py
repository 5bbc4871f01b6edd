"""Compares what two policy versions earned on the tasks that both had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from ...core.records import Mode
from ...core.statistics import bootstrap_mean, mean_and_spread
from ...store.versions import TaskMean

SEED = 0  # of the bootstrap, so that the same rewards always give the same interval

ByTask = Mapping[str, TaskMean]


def compared(means: Sequence[TaskMean], a: int, b: int, mode: Mode | None) -> dict[str, Any]:
    """Return the comparison as JSON: how far `b` is above `a`, as a mean over tasks, paired.

    Without a mode, rollouts of `eval` are compared if both versions have some of a common task, else those of `train`.
    """
    mode = mode or ("eval" if _of(means, a, "eval").keys() & _of(means, b, "eval").keys() else "train")
    of_a, of_b = _of(means, a, mode), _of(means, b, mode)
    tasks = sorted(of_a.keys() & of_b.keys())
    differences = [of_b[task].mean - of_a[task].mean for task in tasks]
    return {
        "a": a,
        "b": b,
        "mode": mode,
        "rollouts_a": sum(mean.rollouts for mean in of_a.values()),
        "rollouts_b": sum(mean.rollouts for mean in of_b.values()),
        "tasks": len(tasks),
        "mean_a": mean_and_spread([of_a[task].mean for task in tasks])[0] if tasks else None,
        "mean_b": mean_and_spread([of_b[task].mean for task in tasks])[0] if tasks else None,
        "difference": mean_and_spread(differences)[0] if tasks else None,
        "interval": astuple(bootstrap_mean(differences, SEED)) if tasks else None,
        "data": [{"task_id": task, "a": _view(of_a[task]), "b": _view(of_b[task])} for task in tasks],
    }


def _of(means: Sequence[TaskMean], version: int, mode: Mode) -> ByTask:
    return {one.task_id: one for one in means if (one.version, one.mode) == (version, mode) and one.task_id is not None}


def _view(mean: TaskMean) -> dict[str, Any]:
    costs = {"tokens": mean.tokens, "latency_ms": mean.latency_ms}
    return {"mean": mean.mean, "rollouts": mean.rollouts} | (costs if mean.tokens is not None else {})
