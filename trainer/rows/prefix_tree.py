"""Stores rows of tokens as one tree, in which every shared prefix exists only once. numpy only.

Nodes are numbered in preorder, so a subtree is an interval, and "is an ancestor of" takes two comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """N unique tokens in preorder.

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
    """Return the tree of `rows`, in O(tokens): a sorted row shares its longest prefix with the row before it."""
    paths: list[Ints] = [np.empty(0, np.int64)] * len(rows)
    tokens: list[Ints] = []
    depths: list[Ints] = []
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
    return PrefixTree(_joined(tokens), _joined(depths), ends[:size].copy(), tuple(paths))


def padded_tree(tree: PrefixTree, multiple: int) -> PrefixTree:
    """Return the tree with nodes added that no other node sees, up to a multiple of `multiple`."""
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


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
