"""The statistics of `eval`: pass@k, intervals and paired comparisons over tasks.

The tasks are the sample and siblings of one task are alike, so tasks are resampled, never rollouts.
`weigh` tests whether they show a drop, or exclude one of more than the margin, as promotion does for a new version.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.statistics import RESAMPLES, Interval, bootstrap_mean, difference, evidence_of

EXACT_UP_TO = 13  # tasks: no more sign patterns than resamples
MARGIN, LEVEL = 0.1, 0.05
SEED = 0  # of bootstrap and permutations, so that the same rollouts always give the same numbers
Rewards = Mapping[str, Sequence[float]]  # by task


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far one row is above another, as a mean over tasks. `p` is that of a two-sided sign-flip test."""

    difference: float
    interval: Interval
    p: float
    tasks: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased chance that at least one of k <= n rollouts passes, if c of n did.

    Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def compare(values: Sequence[float], others: Sequence[float], seed: int = SEED) -> Comparison:
    """Compare `values` with `others`, paired: both have the same tasks in the same order."""
    differences = np.asarray(values, dtype=float) - np.asarray(others, dtype=float)
    interval = bootstrap_mean(differences.tolist(), seed)
    return Comparison(float(differences.mean()), interval, sign_flip_p(differences.tolist(), seed), len(differences))


def sign_flip_p(differences: Sequence[float], seed: int) -> float:
    """Return how often random signs give a mean at least as far from 0 (Fisher's permutation test).

    For few tasks it tries all patterns of signs; otherwise random ones, and the one that was seen.
    """
    given = np.asarray(differences, dtype=float)
    seen = abs(given.sum()) - 1e-9  # the same numbers in another order may sum to a little less
    if len(given) <= EXACT_UP_TO:
        patterns = itertools.product((-1.0, 1.0), repeat=len(given))
        return float(np.mean([abs(np.dot(signs, given)) >= seen for signs in patterns]))
    rng = np.random.default_rng(seed)
    drawn = [abs(np.dot(rng.choice((-1.0, 1.0), len(given)), given)) >= seen for _ in range(RESAMPLES)]
    return float(np.mean([True, *drawn]))


def ks(samples: int) -> list[int]:
    """Return the k of pass@k to show: 1, 2, 4, … and the number of samples itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples}) if samples > 0 else []


def weigh(rewards: Rewards, first: Rewards) -> dict[str, Any]:
    """Weigh a row against the first one; both have the same tasks.

    `margin`: a tenth of the rewards' range, which is 0 to 1, or wider if rewards are. `shown`: there is a drop, with an
    e-value of at least `needed`. `excluded`: there is none of more than `margin`.
    """
    seen = [reward for rows in (rewards, first) for task in rows.values() for reward in task]
    low, high = min(0.0, *seen), max(1.0, *seen)
    pairs = (difference(rewards[task], first[task], low, high) for task in rewards)
    evidence, needed = evidence_of(pairs, MARGIN, LEVEL), 1 / LEVEL
    return {
        "margin": MARGIN * high - MARGIN * low,
        "e_drop": evidence.e_drop,
        "e_safe": evidence.e_safe,
        "needed": needed,
        "shown": evidence.e_drop >= needed,
        "excluded": evidence.e_safe >= needed,
    }


def same_version(row: Mapping[str, Any], first: Mapping[str, Any]) -> int | None:
    """Return the policy version that answered in both rows, beside the same other models; None if there is no such."""
    ours = [version for version in row["policy_versions"] if version is not None]
    return ours[0] if len(ours) == 1 and row["policy_versions"] == first["policy_versions"] else None


def comparison_line(row: Mapping[str, Any], first: str) -> str:
    versus, beside = row["versus"], f"{row['model']} beside {first}"
    if (version := versus["same_version"]) is not None:
        return f"{beside}: both are policy version {version}, so any difference is chance"
    found = versus["evidence"]
    margin, excluded = f"{found['margin']:g}", found["excluded"]
    if found["shown"]:
        return f"{beside}: a drop is shown" + (f", and one of more than {margin} is excluded" if excluded else "")
    if excluded:
        return f"{beside}: a drop of more than {margin} is excluded"
    return (
        f"{beside}: a drop of more than {margin} is not excluded yet (evidence {found['e_safe']:.2g}, "
        f"{found['needed']:g} are needed)"
    )
