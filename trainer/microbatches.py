"""Micro-batches: which samples of a step are computed together as one prefix tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_proxy.trainer.prefix_tree import PrefixTree, build_tree
from lightning_proxy.trainer.types import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples and their tree: `tree.paths[r]` is `samples[r]` less its last token, which predicts nothing."""

    samples: tuple[Sample, ...]
    tree: PrefixTree

    @property
    def padded_tokens(self) -> int:
        """Tokens that the same samples take as a right-padded batch."""
        return len(self.samples) * max(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class TreeCost:
    """Relative cost of a tree of N nodes: N for the linear layers, plus N² · `attention` for the masked attention."""

    attention: float
    max_nodes: int

    def __call__(self, tree: PrefixTree) -> float:
        return len(tree) + self.attention * len(tree) ** 2


def micro_batches(samples: Sequence[Sample], cost: TreeCost) -> list[MicroBatch]:
    """Samples of a task stay together; tasks are joined where sharing their prefix saves more than attention costs.

    No micro-batch has more than `cost.max_nodes` nodes, unless a single sample has.
    """
    done: list[MicroBatch] = []
    for piece in _pieces(samples, cost.max_nodes):
        joined = _batch((*done[-1].samples, *piece.samples)) if done else None
        if joined and len(joined.tree) <= cost.max_nodes and cost(joined.tree) < cost(done[-1].tree) + cost(piece.tree):
            done[-1] = joined
        else:
            done.append(piece)
    return done


def _pieces(samples: Sequence[Sample], max_nodes: int) -> Iterator[MicroBatch]:
    tasks: dict[str, list[Sample]] = {}
    for sample in samples:
        tasks.setdefault(sample.task_id, []).append(sample)
    for group in tasks.values():
        yield from _split(_batch(tuple(sorted(group, key=lambda s: s.token_ids))), max_nodes)


def _split(batch: MicroBatch, max_nodes: int) -> Iterator[MicroBatch]:
    """Halve a batch until it fits; its samples are sorted, so the halves keep most of what they share."""
    if len(batch.tree) <= max_nodes or len(batch.samples) == 1:
        yield batch
        return
    middle = len(batch.samples) // 2
    for half in (batch.samples[:middle], batch.samples[middle:]):
        yield from _split(_batch(half), max_nodes)


def _batch(samples: tuple[Sample, ...]) -> MicroBatch:
    return MicroBatch(samples, build_tree([s.token_ids[:-1] for s in samples]))
