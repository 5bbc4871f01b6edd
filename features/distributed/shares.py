"""Shares out the micro-batches of a step over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ...trainer.rows.prefix_tree import MicroBatch, TreeCost, halves

Shares = list[list[MicroBatch]]


def share_out(parts: Sequence[MicroBatch], cost: TreeCost, ranks: int) -> Shares:
    """Return micro-batches by rank. The slowest rank's largest one is halved while that makes the step shorter.

    Every half computes their shared prefix anew, so the total work grows; what counts is the slowest rank.
    """
    if ranks == 1:
        return [list(parts)]
    shares = _longest_first(parts, cost, ranks)
    while parts:
        slowest = max(shares, key=lambda share: _work(share, cost))
        largest = max(slowest, key=lambda part: cost(part.tree))
        parts = [part for part in parts if part is not largest] + list(halves(largest))
        finer = _longest_first(parts, cost, ranks)
        if max(_work(share, cost) for share in finer) >= _work(slowest, cost):
            break
        shares = finer
    return shares


def _longest_first(parts: Sequence[MicroBatch], cost: TreeCost, ranks: int) -> Shares:
    """The longest part first, each to the rank with the least so far (Graham 1969): at most 4/3 of the best."""
    shares: Shares = [[] for _ in range(ranks)]
    for part in sorted(parts, key=lambda part: cost(part.tree), reverse=True):
        min(shares, key=lambda share: _work(share, cost)).append(part)
    return shares


def _work(share: Sequence[MicroBatch], cost: TreeCost) -> float:
    return sum(cost(part.tree) for part in share)
