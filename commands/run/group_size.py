"""Says before a run whether the trainer will make steps of its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...proxy.config.trainer import TrainerConfig
from ...trainer.credit.baselines import ACROSS_TASKS
from ..formats import duration
from .tasks import Task


def too_small(config: TrainerConfig, tasks: Sequence[Task], group_size: int) -> str | None:
    """Return what is wrong with groups of this size, and what to do. None if each task gets enough siblings."""
    siblings = group_size * min(Counter(task.task_id for task in tasks).values())
    if siblings >= config.group_size or config.baseline in ACROSS_TASKS:
        return None
    way_out = f"leave --group-size out, or give {config.group_size} (trainer.group_size)"
    if siblings == 1:
        if config.takes_lone_rollouts:
            return None
        return f"no step will come of this: each task gets one rollout, with nothing to compare it with; {way_out}"
    return (
        f"a task gets {siblings} rollouts, fewer than the {config.group_size} that the trainer compares: "
        f"it waits {duration(config.group_timeout_s)} for the others; {way_out}"
    )
