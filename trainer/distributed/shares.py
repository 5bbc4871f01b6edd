"""Which rank computes which micro-batch of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..rows.microbatches import MicroBatch, TreeCost, halves
from .ranks import Ranks

Shares = list[list[MicroBatch]]


class Turn(NamedTuple):
    """A micro-batch to compute. `counts`: else only because another rank is computing, and needs this one's shards."""

    micro_batch: MicroBatch
    counts: bool


def turns(parts: Sequence[MicroBatch], cost: TreeCost, ranks: Ranks) -> list[Turn]:
    """What this rank computes of a step; as often as any other, if the base model is sharded."""
    shares = share_out(parts, cost, ranks.size)
    mine = [Turn(part, True) for part in shares[ranks.rank]]
    if ranks.sharded and parts:
        smallest = min(parts, key=lambda part: len(part.tree))
        mine += [Turn(smallest, False)] * (max(map(len, shares)) - len(mine))
    return mine


def share_out(parts: Sequence[MicroBatch], cost: TreeCost, ranks: int) -> Shares:
    """Micro-batches by rank. One that keeps everybody waiting is halved, as long as that makes the step shorter.

    Every half computes the prefix that they share anew, so the total grows; what counts is the slowest rank.
    """
    if ranks == 1:
        return [list(parts)]
    shares = _longest_first(parts, cost, ranks)
    while parts:
        slowest = max(shares, key=lambda share: _sum(share, cost))
        largest = max(slowest, key=lambda part: cost(part.tree))
        parts = [part for part in parts if part is not largest] + list(halves(largest))
        finer = _longest_first(parts, cost, ranks)
        if _longest(finer, cost) >= _longest(shares, cost):
            break
        shares = finer
    return shares


def _longest_first(parts: Sequence[MicroBatch], cost: TreeCost, ranks: int) -> Shares:
    """The longest part first, each to the rank with the least so far (Graham 1969): at most 4/3 of the best."""
    shares: Shares = [[] for _ in range(ranks)]
    for part in sorted(parts, key=lambda part: cost(part.tree), reverse=True):
        min(shares, key=lambda share: _sum(share, cost)).append(part)
    return shares


def _longest(shares: Shares, cost: TreeCost) -> float:
    return max(_sum(share, cost) for share in shares)


def _sum(share: Sequence[MicroBatch], cost: TreeCost) -> float:
    return sum(cost(part.tree) for part in share)
