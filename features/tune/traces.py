"""Chooses rows to imitate: those of the answers in the best rollouts of each task.

RAFT (https://arxiv.org/abs/2304.06767) keeps the best answers to each prompt, STaR (https://arxiv.org/abs/2203.14465)
the right ones. RFT (https://arxiv.org/abs/2308.01825) shows that different answers teach more than copies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...core.config.trainer import TrainerConfig
from ...store.store import Store
from ...trainer.report.batch_metrics import Seen
from ...trainer.types import Sample, Sift
from .config import TuneConfig
from .lessons import Lessons, lessons_of
from .rollouts import NothingToLearn, RewardedRollout, RolloutReader, what_was_left_out
from .trace_tokens import as_trace

Traces = Lessons[Sample]


class TraceReader:
    """Reads traces from the store."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        vocabulary: int | None = None,
        sift: Sift | None = None,
    ) -> None:
        """A row has at most `max_tokens` tokens. `vocabulary` is the number of the model's tokens (None: any)."""
        self._config = config.section(TuneConfig).sft
        as_lesson = partial(as_trace, tokenizer=tokenizer)
        self._rollouts = RolloutReader(config, store, as_lesson, max_tokens, vocabulary, sift)

    async def read(self, among: Collection[str] | None = None) -> Traces:
        """Return the best rollouts of each task, among all or `among` these. Raises NothingToLearn without any.

        The best have at least the reward `sft.min_reward`; the highest come first, and the newest among equals. At most
        `sft.top` of a task are taken, no two of them with the same tokens.
        """
        seen = Seen()
        rewarded = await self._rollouts.rewarded(among, seen)
        tasks: dict[str, list[RewardedRollout]] = {}
        for good in sorted((r for r in rewarded if self._is_good(r.reward)), key=lambda r: -r.reward):
            tasks.setdefault(good.siblings, []).append(good)
        if not tasks:
            raise NothingToLearn(self._why_none_is_good([r.reward for r in rewarded]))
        ordered = self._rollouts.in_order(tasks)
        found = [rows for task in ordered if (rows := await self._best(tasks[task], seen))]
        if not found:
            raise NothingToLearn(
                f"nothing to learn from: {sum(map(len, tasks.values()))} rollouts have a reward that is high enough, "
                f"and no call of theirs can be learned from: {what_was_left_out(seen) or 'they have none'}"
            )
        return lessons_of(found, self._config.held_out, seen, calls_untokenised=float(seen.counts["calls_untokenised"]))

    def _is_good(self, reward: float) -> bool:
        least = self._config.min_reward
        return reward > 0 if least is None else reward >= least

    async def _best(self, rollouts: Sequence[RewardedRollout], seen: Seen) -> list[Sample]:
        """The rows of a task's best rollouts that differ and can be learned from; `rollouts` come best first."""
        found: dict[Any, tuple[Sample, ...]] = {}
        for rollout, *_ in rollouts:
            rows = await self._rollouts.rows(rollout, seen)
            if rows:
                found.setdefault(tuple((s.token_ids, s.mask) for s in rows), rows)
            if len(found) == self._config.top:
                break
        return [row for rows in found.values() for row in rows]

    def _why_none_is_good(self, rewards: Sequence[float]) -> str:
        if not rewards:
            return "nothing to learn from: no rollout of mode train is completed and has a reward"
        least = self._config.min_reward
        wanted = "above 0" if least is None else f"of at least {least:g}"
        return (
            f"nothing to learn from: none of {len(rewards)} rollouts has a reward {wanted}; theirs are from "
            f"{min(rewards):g} to {max(rewards):g}, {fmean(rewards):.3g} on average (tune.sft.min_reward, "
            "--min-reward)"
        )
