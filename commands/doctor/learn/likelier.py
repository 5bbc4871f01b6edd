"""Tests whether a step made what was rewarded likelier than what was not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHUFFLES = 2000
SURE = 0.01  # the largest p-value that counts


class Likelier(NamedTuple):
    """By how many nats an answer gained on its siblings for each point of reward, and the p-value of that."""

    nats: float
    p: float

    @property
    def is_sure(self) -> bool:
        return self.nats > 0 and self.p <= SURE


def likelier(groups: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int = 0) -> Likelier:
    """Compare siblings: of each group the rewards, and the changes of the answers' log-probabilities.

    The p-value is that of a permutation test: how often rewards that are shuffled among siblings do as well.

    >>> likelier([([1, 0, 1, 0], [0.5, 0.1, 0.5, 0.1])])[0]
    0.4
    """
    rng = np.random.default_rng(seed)
    covariance, spread, shuffled = 0.0, 0.0, np.zeros(SHUFFLES)
    for rewards, changes in groups:
        r, c = np.asarray(rewards, dtype=float), np.asarray(changes, dtype=float)
        r, c = r - r.mean(), c - c.mean()
        covariance += float(r @ c)
        spread += float(r @ r)
        shuffled += rng.permuted(np.tile(r, (SHUFFLES, 1)), axis=1) @ c
    as_good = int((shuffled >= covariance - 1e-12).sum())
    return Likelier(covariance / spread if spread else 0.0, (1 + as_good) / (1 + SHUFFLES))
