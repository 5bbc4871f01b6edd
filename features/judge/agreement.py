"""Measures how far a rewarder agrees with labels, and what it is biased by. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import StatisticsError, correlation, fmean

from ...core.statistics import bootstrap_mean
from .table import ENOUGH


@dataclass(frozen=True, slots=True)
class Labelled:
    """A rollout with somebody's label, a rewarder's score, and the length of its last answer in characters."""

    rollout_id: str
    task_id: str | None
    label: float
    score: float
    length: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a rewarder agrees with `labels` labels.

    `alike`: the share of `pairs` that both order alike, with its 95 % interval; a tie of the score counts a half.
    `confusion`: numbers of (label is high, score is high), each above the middle of its range, or `threshold`.
    `length`: how scores, and labels, go with the length of the answer (rank correlation).
    """

    labels: int
    pairs: int
    alike: float
    low: float
    high: float
    confusion: dict[str, int]
    length: tuple[float | None, float | None]
    wrong: tuple[Labelled, ...]

    @property
    def verdict(self) -> str:
        """Return what follows from it."""
        if self.low <= 0.5:
            return "it should not be trained on: its order may be chance"
        if self.labels < ENOUGH:
            return f"it agrees more than chance does, by {self.labels} labels; {ENOUGH} are enough to begin"
        return "it agrees more than chance does"


def agreement(found: Sequence[Labelled], *, within_tasks: bool, threshold: float | None = None) -> Agreement | None:
    """Return how scores agree with labels; None if no two labels differ.

    `within_tasks`: only rollouts of one task are compared. Otherwise that is so where there are such pairs.
    """
    of_tasks = [*_pairs(found, by_task=True)]
    pairs = of_tasks if of_tasks or within_tasks else [*_pairs(found, by_task=False)]
    if not pairs:
        return None
    by_unit: dict[str, list[float]] = defaultdict(list)
    many = len({one.task_id for one, _ in of_tasks}) > 4
    for one, other in pairs:
        for unit in (one.task_id,) if many else (one.rollout_id, other.rollout_id):
            by_unit[str(unit)].append(_alike(one, other))
    means, sizes = [*map(fmean, by_unit.values())], [*map(len, by_unit.values())]
    interval = bootstrap_mean(means, seed=0, weights=sizes)
    high_label = _middle([one.label for one in found])
    high_score = _middle([one.score for one in found]) if threshold is None else threshold
    confusion = dict.fromkeys(("right high", "right low", "wrong high", "wrong low"), 0)
    for one in found:
        is_high = one.score > high_score
        right = "right" if is_high == (one.label > high_label) else "wrong"
        confusion[f"{right} {'high' if is_high else 'low'}"] += 1
    return Agreement(
        len(found), len(pairs), fmean(_alike(*pair) for pair in pairs), interval.low, interval.high, confusion,
        (spearman([(o.score, o.length) for o in found]), spearman([(o.label, o.length) for o in found])),
        tuple(sorted(found, key=lambda one: -abs(_place(one, found, "score") - _place(one, found, "label")))[:5]),
    )  # fmt: skip


def same_order(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the share of pairs that two scorings of the same group order alike; None without a pair."""
    pairs = [*combinations(zip(first, second, strict=True), 2)]
    return fmean(_sign(a - c) == _sign(b - d) for (a, b), (c, d) in pairs) if pairs else None


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the rank correlation; None where one side does not vary."""
    try:
        return correlation(_ranks([one for one, _ in pairs]), _ranks([other for _, other in pairs]))
    except StatisticsError:
        return None


def _pairs(found: Sequence[Labelled], *, by_task: bool) -> Iterator[tuple[Labelled, Labelled]]:
    groups: dict[str | None, list[Labelled]] = defaultdict(list)
    for one in found:
        groups[one.task_id if by_task else ""].append(one)
    for task, group in groups.items():
        if task is not None:
            yield from ((one, other) for one, other in combinations(group, 2) if one.label != other.label)


def _alike(one: Labelled, other: Labelled) -> float:
    by_score, by_label = _sign(one.score - other.score), _sign(one.label - other.label)
    return 0.5 if by_score == 0 else float(by_score == by_label)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + ordered.count(value) / 2 for value in values]


def _middle(values: Sequence[float]) -> float:
    return (min(values) + max(values)) / 2


def _place(one: Labelled, found: Sequence[Labelled], name: str) -> float:
    """The share of the others that are below it."""
    value = getattr(one, name)
    below = (_sign(value - getattr(other, name)) / 2 + 0.5 for other in found)
    return fmean(below)
