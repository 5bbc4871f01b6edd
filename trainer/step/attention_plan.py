"""How a prefix tree's attention is computed without the N² pairs that do not see each other. numpy only.

In preorder the descendants of nodes [a, b), an unbranched run, are one interval [b, end). So what they look back at is
a plain rectangle, no mask and no copies: keys [a, b), queries [b, end); and among [a, b) itself attention is causal.
What a query finds in its blocks is put together by their log-sum-exp (`tree_attention.py`). Small branchy parts,
where calls would cost more than they save, are one square with a mask.
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

# In pairs of a query and a key, as measured on a CPU: what one more kernel call costs, and the merging of one query.
CALL_COST = 2048
MERGE_COST = 32


class Block(NamedTuple):
    """Queries of an interval against keys of an interval.

    `all`: every query sees every key. `causal`, `tree`: queries and keys are the same; each sees itself and those
    before it, or its ancestors.
    """

    kind: Literal["all", "causal", "tree"]
    queries: tuple[int, int]
    keys: tuple[int, int]

    @property
    def cost(self) -> int:
        """In pairs; a causal block's are all computed."""
        queries, keys = (stop - start for start, stop in (self.queries, self.keys))
        return CALL_COST + queries * (keys + MERGE_COST)


@dataclass(frozen=True, slots=True)
class _Part:
    """Whole subtrees side by side, nodes [start, stop), and the cheapest way found to compute them."""

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
    """Blocks that hold each pair of a node and one of its ancestors, or itself, exactly once."""
    pending: list[_Part] = []  # from the last node to the first; a run's children are on top when it comes
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
    """Append `part`, as one square with those before it where that is cheaper."""
    while parts and (square := _Part.square(parts[-1].start, part.stop)).cost < parts[-1].cost + part.cost:
        part = square
        parts.pop()
    parts.append(part)


def _run_starts(ends: Ints) -> list[int]:
    """Where unbranched runs of at most RUN nodes begin, and N. An only child's subtree ends where its parent's does."""
    starts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(ends)]
    return [cut for start, stop in pairwise(starts) for cut in range(start, stop, RUN)] + [len(ends)]
