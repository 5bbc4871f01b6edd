"""`--dry-run`: what the lessons without a result will cost, as far as finished ones say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...commands.run.tasks import read_tasks
from .plan import Experiment, Json, LessonPlan


def cost(plan: Experiment, lessons: Sequence[LessonPlan], results: Mapping[str, Json], jobs: int) -> list[str]:
    """Return lines about runs, rollouts, calls, tokens and minutes."""
    left = [lesson for lesson in lessons if lesson.name not in results]
    held_out = 2 * len(read_tasks(plan.held_out)) * plan.samples
    train = f"{plan.rollouts} rollouts" if plan.rollouts else f"{plan.minutes:g} minutes"
    lines = [f"{len(lessons)} runs, {len(left)} to do; each trains for {train}, and evaluates {held_out} rollouts"]
    if results and left:
        calls, tokens = (sum(_mean(lesson, results, key) for lesson in left) for key in ("calls", "tokens"))
        minutes = sum(_mean(lesson, results, "minutes") for lesson in left) / jobs
        amount = f"{calls:.0f} calls, {tokens:.0f} tokens sampled in training, {minutes:.0f} minutes"
        lines.append(f"about {amount}, as measured on {len(results)} finished")
    elif left:
        least = f"{len(left) * (held_out + (plan.rollouts or 0))} calls"
        least += f" and {len(left) * plan.minutes / jobs:.0f} minutes" if plan.minutes else ""
        lines.append(f"at least {least}; once a run is finished, --dry-run says how long the others take")
    return lines


def _mean(lesson: LessonPlan, results: Mapping[str, Json], key: str) -> float:
    """The mean of the variant's finished lessons, or else of all."""
    own = [one for one in results.values() if one["variant"] == lesson.variant] or list(results.values())
    values = [sum(one["minutes"].values()) if key == "minutes" else one[key] for one in own]
    return sum(values) / len(values)
