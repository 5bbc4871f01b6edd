"""Checks before a run whether the trainer will make steps of its groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...core.config.trainer import TrainerConfig
from ...trainer.credit.strategies import ACROSS_TASKS
from ..formats import duration
from .tasks import Task


def too_small(config: TrainerConfig, tasks: Sequence[Task], group_size: int) -> str | None:
    """Return the problem with groups of this size, and its fix. None if each rollout gets enough siblings.

    Several that are opened together are a group. Single ones become groups of `trainer.group_size` of a task.
    """
    siblings = group_size * min(Counter(task.task_id for task in tasks).values())
    if group_size > 1 or siblings >= config.group_size or config.baseline in ACROSS_TASKS:
        return None
    way_out = f"leave --group-size out, or give {config.group_size} (trainer.group_size)"
    if siblings == 1:
        if config.takes_lone_rollouts:
            return None
        return f"no step will be taken: each task gets one rollout, with nothing to compare it with; {way_out}"
    return (
        f"a task gets {siblings} rollouts, fewer than the {config.group_size} that the trainer compares: "
        f"the trainer waits {duration(config.group_timeout_s)} for the others; {way_out}"
    )


def too_few(config: TrainerConfig, tasks: Sequence[Task], group_size: int, waiting: int = 0) -> str | None:
    """Return what to do where there are fewer groups than a step takes; None if there are enough of them.

    `waiting`: rollouts of complete groups that wait for the trainer already.
    """
    siblings, there = Counter(task.task_id for task in tasks).values(), waiting // config.group_size
    groups = len(tasks) if group_size > 1 else sum(of_task // config.group_size for of_task in siblings)
    missing = config.tasks_per_step - there
    if not 0 < groups < missing or config.schedule.when in ("rollouts", "times"):  # a round's last step may be small
        return None
    comes = f"{groups} {'group comes' if groups == 1 else 'groups come'} of this" + f", {there} wait" * (there > 0)
    return (
        f"{comes}, and a step takes {config.tasks_per_step} "
        f"(trainer.tasks_per_step): if no others come, it waits {duration(config.group_timeout_s)} for them; "
        f"add tasks, or --repeat {math.ceil(missing / groups)}"
    )
