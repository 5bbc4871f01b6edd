"""Turns returns into advantages, by baselines over the siblings of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, stdev
from types import MappingProxyType

from ..functions import load

STD_EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline for the returns of one rollout's calls: advantage = (return - shift) / scale."""

    shift: float
    scale: float = 1.0

    def advantage(self, call_return: float) -> float:
        return (call_return - self.shift) / self.scale


def grpo(returns: Sequence[float]) -> list[Baseline]:
    """Compute (r - mean) / (std + 1e-4) with the sample standard deviation, as TRL (DeepSeekMath, arXiv 2402.03300)."""
    return [Baseline(fmean(returns), stdev(returns) + STD_EPSILON)] * len(returns)


def dr_grpo(returns: Sequence[float]) -> list[Baseline]:
    """Compute r - mean. GRPO's division favours very easy and very hard tasks (Dr. GRPO, arXiv 2503.20783)."""
    return [Baseline(fmean(returns))] * len(returns)


def rloo(returns: Sequence[float]) -> list[Baseline]:
    """Compute r - the mean of the other siblings (REINFORCE leave-one-out, arXiv 2402.14740)."""
    total = math.fsum(returns)
    return [Baseline((total - r) / (len(returns) - 1)) for r in returns]


def reinforce_pp(returns: Sequence[float]) -> list[Baseline]:
    """Compute (r - mean) / sqrt(variance + 1e-8) over the entire step, across tasks (REINFORCE++, arXiv 2501.03262).

    The paper takes the variance over tokens; here every rollout counts once, as in the loss.
    """
    return [Baseline(fmean(returns), math.sqrt(pvariance(returns) + 1e-8))] * len(returns)


BASELINES: Mapping[str, Callable[[Sequence[float]], list[Baseline]]] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_pp": reinforce_pp}
)
# Baselines that compare all rollouts of a step, not only those of one task.
ACROSS_TASKS = frozenset({"reinforce_pp"})


def group_baselines(name: str, returns: Sequence[float]) -> list[Baseline] | None:
    """Return one baseline per sibling; None if the group has fewer than two siblings or only equal returns."""
    if len(returns) < 2 or math.isclose(max(returns), min(returns), rel_tol=1e-9, abs_tol=1e-9):
        return None
    found: list[Baseline] = (BASELINES.get(name) or load("trainer.baseline", name))(returns)
    return found


def compared(name: str, returns: Sequence[float]) -> list[float]:
    """Return the advantage of each return among all; zeros where there is nothing to compare."""
    baselines = group_baselines(name, returns)
    if baselines is None:
        return [0.0] * len(returns)
    return [own.advantage(value) for own, value in zip(baselines, returns, strict=True)]
