"""Chooses what is learned by thumbs: the rows of every rewarded rollout, each with thumbs up or down. No siblings.

KTO (https://arxiv.org/abs/2402.01306) needs to know only whether an answer is good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from ...proxy.config.trainer import TrainerConfig
from ...proxy.store.store import Store
from ..report.batch_metrics import Seen
from ..tuning.rollouts import NothingToLearn, RolloutReader, as_sampled, digest, split, what_was_left_out
from ..types import Sample


class Thumb(NamedTuple):
    """A row, and whether its rollout is a good one."""

    sample: Sample
    up: bool


@dataclass(frozen=True, slots=True)
class Thumbs:
    """Rows to learn from, and rows of other tasks to measure on; `metrics` counts how they came about."""

    train: tuple[Thumb, ...]
    held_out: tuple[Thumb, ...]
    metrics: dict[str, float]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(thumb.sample for thumb in self.train)

    @property
    def rollout_ids(self) -> list[str]:
        return list(dict.fromkeys(thumb.sample.rollout_id for thumb in (*self.train, *self.held_out)))

    @property
    def digest(self) -> str:
        """Return a digest that is equal for two exactly if they have the same rows and thumbs."""
        parts = (self.train, self.held_out)
        return digest([[one.sample for one in part if one.up is up] for part in parts for up in (True, False)])


class ThumbReader:
    """Reads rows with thumbs from the store."""

    def __init__(self, config: TrainerConfig, store: Store, max_tokens: int, vocabulary: int | None = None) -> None:
        """A row has at most `max_tokens` tokens. `vocabulary` is the number of the model's tokens (None: any)."""
        self._config = config.kto
        self._rollouts = RolloutReader(config, store, as_sampled, max_tokens, vocabulary)

    async def read(self, among: Collection[str] | None = None) -> Thumbs:
        """Return the rows of all rollouts or `among` these; up is a reward above `kto.threshold`.

        Raises NothingToLearn without at least two rows to learn from.
        """
        seen = Seen()
        tasks: dict[str, list[Thumb]] = {}
        for one in await self._rollouts.rewarded(among, seen):
            rows = await self._rollouts.rows(one.rollout, seen)
            if rows:
                up = one.reward > self._config.threshold
                tasks.setdefault(one.task, []).extend(Thumb(row, up) for row in rows)
        found = [tasks[task] for task in self._rollouts.in_order(tasks)]
        train, held_out, counts = split(found, self._config.held_out, lambda thumb: thumb.sample)
        if len(train) < 2:
            raise NothingToLearn(
                f"nothing to learn from: {seen.rollouts} rollouts of mode train are completed and have a reward, with "
                f"{len(train)} rows to learn from, and KTO needs two. {what_was_left_out(seen)}".strip()
            )
        train.sort(key=_mixed)
        metrics = seen.metrics() | counts | {
            "groups": float(seen.groups),
            "rollouts_trained": float(len({thumb.sample.rollout_id for thumb in train})),
            "samples": float(len(train)),
            "thumbs_up": float(sum(thumb.up for thumb in train)),
            "thumbs_down": float(sum(not thumb.up for thumb in train)),
        }  # fmt: skip
        return Thumbs(tuple(train), tuple(held_out), metrics)


def _mixed(thumb: Thumb) -> bytes:
    """A sort key that looks random: neighbours lend each other their answers, and should be of different tasks."""
    return hashlib.sha256(repr((thumb.sample.rollout_id, thumb.sample.call_ids)).encode()).digest()
