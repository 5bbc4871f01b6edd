"""Stores rows of tokens as trees, in which every shared prefix exists only once, and cuts a step into such trees.

Nodes are numbered in preorder, so a subtree is an interval, and "is an ancestor of" takes two comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from ..types import Sample

Ints = NDArray[np.int64]

_PASS_COST = 1.0  # of a forward and backward pass, in nodes: fewer passes where nothing else decides
_MEMORY_COST = 0.25  # the work that may be spent to save a node of memory


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A tree of N nodes, each with one token, in preorder.

    `token_ids`, `depths` and `ends` are (N,). The subtree of node i is the interval [i, ends[i]).
    `paths[r][t]` is the node of token t of row r. Rows are in the order in which they were given.
    """

    token_ids: Ints
    depths: Ints
    ends: Ints
    paths: tuple[Ints, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


def build_tree(rows: Sequence[Sequence[int]]) -> PrefixTree:
    """Return the tree of `rows`. They are sorted first, so each row is compared with only the one before it."""
    paths: list[Ints] = [np.empty(0, np.int64)] * len(rows)
    tokens, depths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    ends = np.empty(sum(map(len, rows)), np.int64)
    size, path, before = 0, np.empty(0, np.int64), np.empty(0, np.int64)
    for index in sorted(range(len(rows)), key=lambda i: tuple(rows[i])):
        row = np.asarray(rows[index], np.int64)
        shared = shared_prefix(before, row)
        ends[path[shared:]] = size
        new = np.arange(size, size + len(row) - shared)
        tokens.append(row[shared:])
        depths.append(np.arange(shared, len(row)))
        path, before, size = np.concatenate([path[:shared], new]), row, size + len(new)
        paths[index] = path
    ends[path] = size
    return PrefixTree(np.concatenate(tokens), np.concatenate(depths), ends[:size].copy(), tuple(paths))


def padded_tree(tree: PrefixTree, multiple: int) -> PrefixTree:
    """Return the tree, padded to a multiple of `multiple` nodes. No other node sees the added ones."""
    extra = np.arange(len(tree), -(-len(tree) // multiple) * multiple)
    zeros = np.zeros(len(extra), np.int64)
    return PrefixTree(
        np.concatenate([tree.token_ids, zeros]),
        np.concatenate([tree.depths, zeros]),
        np.concatenate([tree.ends, extra + 1]),
        tree.paths,
    )


def shared_prefix(a: Ints, b: Ints) -> int:
    """Return the number of leading tokens that `a` and `b` have in common."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one adapter, and their tree.

    `tree.paths[r]` is `samples[r]` without its last token, which predicts nothing.
    """

    samples: tuple[Sample, ...]
    tree: PrefixTree

    @property
    def adapter(self) -> str:
        return self.samples[0].adapter


@dataclass(frozen=True, slots=True)
class TreeCost:
    """The cost of computing a tree, in units of the work that one node takes in the linear layers.

    `attention` is the work for a node and one node that it sees (itself or an ancestor). At most `max_nodes` fit into
    one pass. Each node beyond `comfortable` (None: `max_nodes`) costs 0.25 more, for the memory that it takes.
    """

    attention: float
    max_nodes: int
    comfortable: int | None = None

    def __call__(self, tree: PrefixTree) -> float:
        return len(tree) + self.attention * float(tree.depths.sum() + len(tree))

    def prefix(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the cost of the first `lengths` nodes of a row."""
        return lengths + self.attention * lengths * (lengths + 1) / 2

    def memory(self, nodes: Ints) -> NDArray[np.float64]:
        """Return the cost of memory for passes of this many nodes; 0 up to `comfortable`."""
        comfortable = self.max_nodes if self.comfortable is None else self.comfortable
        return np.maximum(nodes - comfortable, 0).astype(np.float64) * _MEMORY_COST


def micro_batches(samples: Sequence[Sample], cost: TreeCost) -> list[MicroBatch]:
    """Cut `samples` into micro-batches so that repeated computation, passes and memory together cost the least.

    Sorted by tokens, samples share most with their neighbours, and a cut costs just what the two samples next to it
    share; so the best cuts are found one at a time. Samples of two adapters share nothing, since each adapter gives the
    same tokens different hidden states. A micro-batch exceeds `cost.max_nodes` only if it is a single sample.
    """
    found: list[MicroBatch] = []
    in_order = sorted(samples, key=lambda sample: (sample.adapter, sample.token_ids))
    for _, of_adapter in groupby(in_order, key=lambda sample: sample.adapter):
        ordered = tuple(of_adapter)
        rows = [np.asarray(sample.token_ids[:-1], np.int64) for sample in ordered]
        shared = np.array([shared_prefix(a, b) for a, b in pairwise([np.empty(0, np.int64), *rows])], np.int64)
        cuts = _cheapest_cuts(np.array([len(row) for row in rows], np.int64), shared, cost)
        found += [_batch(ordered[start:stop]) for start, stop in pairwise(cuts)]
    return found


def _cheapest_cuts(lengths: Ints, shared: Ints, cost: TreeCost) -> list[int]:
    """Return where each part begins, then the number of rows. Row i shares `shared[i]` nodes with row i - 1."""
    total = np.concatenate([[0], np.cumsum(lengths - shared)])
    price = cost.prefix(shared) + _PASS_COST
    spent = np.zeros(len(lengths))  # the cost of all passes and cuts up to the one before row i
    begins = np.zeros(len(lengths) + 1, np.int64)
    first = 0
    for stop in range(1, len(lengths) + 1):
        while first < stop - 1 and total[stop] - total[first] + shared[first] > cost.max_nodes:
            first += 1
        last = spent[first:stop] + cost.memory(total[stop] - total[first:stop] + shared[first:stop])
        best = int(np.argmin(last))
        begins[stop] = first + best
        if stop < len(lengths):
            spent[stop] = last[best] + price[stop]
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(int(begins[cuts[-1]]))
    return cuts[::-1]


def halves(batch: MicroBatch) -> list[MicroBatch]:
    """Split the samples of a batch into two batches. A batch with a single sample is returned as it is."""
    middle = len(batch.samples) // 2
    if not middle:
        return [batch]
    return [_batch(batch.samples[:middle]), _batch(batch.samples[middle:])]


def _batch(samples: tuple[Sample, ...]) -> MicroBatch:
    return MicroBatch(samples, build_tree([s.token_ids[:-1] for s in samples]))
