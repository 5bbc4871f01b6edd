"""MaxRL: gives more weight to tasks that rarely succeed (`trainer.baseline: maxrl`).

    A_i = (r_i - m) / m, where m is the mean of the N siblings' returns; 0 where m is not above 0

With rewards of 0 and 1, `dr_grpo` estimates the gradient of the success rate p, and MaxRL that of log p, which is 1/p
times as large (up to order N - 1 of its series in 1 - p). Rewards must not be negative. Source: arXiv 2602.02710,
algorithm 1; TRL's examples/scripts/maxrl.py.

By hand: returns 1, 0, 0, 0 have the mean 1/4, so (1 - 1/4) / (1/4) = 3, and -1 for each of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from ...trainer.credit.strategies import Baseline


def maxrl(returns: Sequence[float]) -> list[Baseline]:
    """Return one baseline for each of the N returns of a group, all the same."""
    mean = fmean(returns)
    return [Baseline(mean, mean if mean > 0 else math.inf)] * len(returns)
