"""Chooses rows to learn from by thumbs: those of every rewarded rollout, each up or down. No siblings.

KTO (https://arxiv.org/abs/2402.01306) needs to know only whether an answer is good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from ...trainer.report.batch_metrics import Seen
from ...trainer.types import Sample
from .lessons import Lessons, lessons_of
from .reader import SampledReader
from .rollouts import NothingToLearn, what_was_left_out


class Thumb(NamedTuple):
    """A row, and whether its rollout is a good one."""

    sample: Sample
    up: bool


Thumbs = Lessons[Thumb]


class ThumbReader(SampledReader):
    """Reads rows with thumbs from the store."""

    async def read(self, among: Collection[str] | None = None) -> Thumbs:
        """Return the rows of all rollouts or `among` these; up is a reward above `kto.threshold`.

        Raises NothingToLearn without at least two rows to learn from.
        """
        seen = Seen()
        tasks: dict[str, list[Thumb]] = {}
        for one in await self._rollouts.rewarded(among, seen):
            rows = await self._rollouts.rows(one.rollout, seen)
            if rows:
                up = one.reward > self._kto.threshold
                tasks.setdefault(one.task, []).extend(Thumb(row, up) for row in rows)
        found = [tasks[task] for task in self._rollouts.in_order(tasks)]
        thumbs = lessons_of(found, self._kto.held_out, seen)
        if len(thumbs.train) < 2:
            raise NothingToLearn(
                f"nothing to learn from: {seen.rollouts} rollouts of mode train are completed and have a reward, with "
                f"{len(thumbs.train)} rows to learn from, and KTO needs two. {what_was_left_out(seen)}".strip()
            )
        liked = sum(thumb.up for thumb in thumbs.train)
        counts = {"thumbs_up": float(liked), "thumbs_down": float(len(thumbs.train) - liked)}
        return Thumbs(tuple(sorted(thumbs.train, key=_mixed)), thumbs.held_out, thumbs.metrics | counts)


def _mixed(thumb: Thumb) -> bytes:
    """A sort key that looks random: neighbours lend each other their answers, and should be of different tasks."""
    return hashlib.sha256(repr((thumb.sample.rollout_id, thumb.sample.call_ids)).encode()).digest()
