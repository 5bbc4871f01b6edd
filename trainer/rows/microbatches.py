"""Micro-batches: which samples of a step are computed together as one prefix tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from ..types import Sample
from .prefix_tree import Ints, PrefixTree, build_tree, shared_prefix


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one adapter and their tree.

    `tree.paths[r]` is `samples[r]` less its last token, which predicts nothing.
    """

    samples: tuple[Sample, ...]
    tree: PrefixTree

    @property
    def adapter(self) -> str:
        return self.samples[0].adapter

    @property
    def padded_tokens(self) -> int:
        """Tokens that the same samples take as a right-padded batch."""
        return len(self.samples) * max(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class TreeCost:
    """What computing a tree costs, in nodes' work in the linear layers; `max_nodes`: more do not fit into one pass.

    `attention`: the work of a node and one that it sees, of which there are as many as there are ancestors.
    """

    attention: float
    max_nodes: int

    def __call__(self, tree: PrefixTree) -> float:
        return len(tree) + self.attention * float(tree.depths.sum() + len(tree))

    def prefix(self, lengths: Ints) -> NDArray[np.float64]:
        """The same of the first so many nodes of a row."""
        return lengths + self.attention * lengths * (lengths + 1) / 2


# What a forward and backward pass costs whatever its size, in nodes: prefers fewer where nothing else decides.
_PASS_COST = 1.0


def micro_batches(samples: Sequence[Sample], cost: TreeCost) -> list[MicroBatch]:
    """Cut `samples`, in the order of their tokens, so that as little as possible is computed twice.

    Samples of two adapters share nothing: each gives the same tokens hidden states of its own. No micro-batch has more
    than `cost.max_nodes` nodes, unless a single sample has. In the order of their tokens a sample shares most with its
    neighbours, and a cut costs just what the two samples beside it share: the best cuts are found one by one.
    """
    by_adapter = groupby(sorted(samples, key=lambda s: (s.adapter, s.token_ids)), key=lambda s: s.adapter)
    return [batch for _, ordered in by_adapter for batch in _of_one_adapter(list(ordered), cost)]


def _of_one_adapter(ordered: Sequence[Sample], cost: TreeCost) -> list[MicroBatch]:
    rows = [np.asarray(sample.token_ids[:-1], np.int64) for sample in ordered]
    shared = np.array([shared_prefix(a, b) for a, b in pairwise([np.empty(0, np.int64), *rows])], np.int64)
    cuts = _cheapest_cuts(np.array([len(row) for row in rows], np.int64), shared, cost)
    return [_batch(tuple(ordered[start:stop])) for start, stop in pairwise(cuts)]


def _cheapest_cuts(lengths: Ints, shared: Ints, cost: TreeCost) -> list[int]:
    """Where groups of rows begin, and the number of rows; row i has its first `shared[i]` nodes from row i - 1."""
    total = np.concatenate([[0], np.cumsum(lengths - shared)])
    price = cost.prefix(shared) + _PASS_COST
    spent = np.zeros(len(lengths))  # with a cut before row i, on it and all before it
    begins = np.zeros(len(lengths) + 1, np.int64)
    first = 0
    for stop in range(1, len(lengths) + 1):
        while first < stop - 1 and total[stop] - total[first] + shared[first] > cost.max_nodes:
            first += 1
        begins[stop] = first + int(np.argmin(spent[first:stop]))
        if stop < len(lengths):
            spent[stop] = spent[begins[stop]] + price[stop]
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(int(begins[cuts[-1]]))
    return cuts[::-1]


def halves(batch: MicroBatch) -> Iterator[MicroBatch]:
    """Two batches of as many samples each, or the batch itself if it has but one sample."""
    middle = len(batch.samples) // 2
    yield from (_batch(half) for half in (batch.samples[:middle], batch.samples[middle:]) if half)


def _batch(samples: tuple[Sample, ...]) -> MicroBatch:
    return MicroBatch(samples, build_tree([s.token_ids[:-1] for s in samples]))
