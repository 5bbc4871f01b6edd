"""Plans a prefix tree's attention in blocks, without the pairs of nodes that do not see each other. numpy only.

In preorder the descendants of an unbranched run of nodes [a, b) are one interval [b, end). So their attention to the
run is a plain rectangle without a mask: keys [a, b), queries [b, end). Within [a, b) attention is causal. A query's
results from several blocks are merged by their log-sum-exp (`tree_attention.py`). Small parts with many branches are
one square with a mask, because more kernel calls would cost more than they save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from ..rows.prefix_tree import Ints, PrefixTree

# Longer runs are cut: within a causal block the kernels save little of what they could.
RUN = 256

# The cost of one more kernel call, and of merging one query, in pairs of a query and a key, as measured on a CPU.
CALL_COST = 2048
MERGE_COST = 32


class Block(NamedTuple):
    """An interval of queries against an interval of keys.

    In a block of kind `all` every query sees every key. In the others queries and keys are the same nodes: in `causal`
    each sees itself and those before it, in `tree` itself and its ancestors.
    """

    kind: Literal["all", "causal", "tree"]
    queries: tuple[int, int]
    keys: tuple[int, int]

    @property
    def cost(self) -> int:
        """Return the cost in pairs. A causal block counts as a full one: the kernel computes all its pairs."""
        queries, keys = (stop - start for start, stop in (self.queries, self.keys))
        return CALL_COST + queries * (keys + MERGE_COST)


@dataclass(frozen=True, slots=True)
class _Part:
    """Complete subtrees side by side, nodes [start, stop), with the cheapest blocks found for them."""

    start: int
    stop: int
    cost: int
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, *blocks: Block, below: Sequence[_Part] = ()) -> _Part:
        cost = sum(block.cost for block in blocks) + sum(part.cost for part in below)
        inner = tuple(block for part in below for block in part.blocks)
        return cls(blocks[0].keys[0], max(block.queries[1] for block in blocks), cost, (*blocks, *inner))

    @classmethod
    def square(cls, start: int, stop: int) -> _Part:
        return cls.of(Block("tree", (start, stop), (start, stop)))


def attention_plan(tree: PrefixTree) -> tuple[Block, ...]:
    """Return blocks in which each node meets itself and each of its ancestors exactly once."""
    pending: list[_Part] = []  # runs come from the last to the first, so a run's children are on top
    for start, stop in reversed(list(pairwise(_run_starts(tree.ends)))):
        end, children = int(tree.ends[start]), list[_Part]()
        while pending and pending[-1].start < end:
            _put_beside(children, pending.pop())
        own = [Block("causal", (start, stop), (start, stop))]
        own += [Block("all", (stop, end), (start, stop))] if end > stop else []
        apart, square = _Part.of(*own, below=children), _Part.square(start, end)
        pending.append(square if square.cost < apart.cost else apart)
    roots: list[_Part] = []
    while pending:
        _put_beside(roots, pending.pop())
    return tuple(block for part in roots for block in part.blocks)


def _put_beside(parts: list[_Part], part: _Part) -> None:
    """Append `part`, or one square of it and the parts before it where that is cheaper."""
    while parts and (square := _Part.square(parts[-1].start, part.stop)).cost < parts[-1].cost + part.cost:
        part = square
        parts.pop()
    parts.append(part)


def _run_starts(ends: Ints) -> list[int]:
    """Starts of unbranched runs of at most RUN nodes, and N. An only child's subtree ends where its parent's ends."""
    starts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(ends)]
    return [cut for start, stop in pairwise(starts) for cut in range(start, stop, RUN)] + [len(ends)]
