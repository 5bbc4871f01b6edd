"""Selects the rollouts that supervised fine-tuning learns from: the best of each task, as in RAFT and STaR.

RAFT (https://arxiv.org/abs/2304.06767) keeps the best answers to each prompt, STaR (https://arxiv.org/abs/2203.14465)
the right ones. RFT (https://arxiv.org/abs/2308.01825) shows that different answers teach more than copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...proxy.config.trainer import TrainerConfig
from ...proxy.errors import LightningError, NotFound
from ...proxy.store.store import Store
from ...proxy.types import Rollout
from ..credit.agents import RollCall, TrainedAgents
from ..credit.rewards import weighted_rewards
from ..report.batch_metrics import Seen
from ..rows.samples import rollout_samples
from ..types import Sample, Sampling
from .trace_tokens import as_trace

PAGE = 500
# The counts of calls that are left out, and their words in an error.
LEFT_OUT = {
    "calls_untrainable": "without tokens to learn from",
    "calls_other_tokens": "of tokens that the model does not have",
    "calls_untokenised": "of other models that the policy's chat template does not show",
    "calls_ambiguous": "with several answers",
    "calls_of_others": "of agents that trainer.agents does not name",
    "rows_too_long": "longer than trainer.max_sample_tokens or the model's context",
}


class NothingToLearn(LightningError):
    """No rollout in the store can be learned from by imitation."""


class Rewarded(NamedTuple):
    """A completed rollout and its reward."""

    rollout: Rollout
    reward: float

    @property
    def task(self) -> str:
        """Return the task's id; the rollout's own if it has no task."""
        return self.rollout.task_id or self.rollout.rollout_id


@dataclass(frozen=True, slots=True)
class Traces:
    """Rows to learn from, and rows of other tasks to measure on; `metrics` counts how they came about."""

    train: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    metrics: dict[str, float]

    @property
    def rollout_ids(self) -> list[str]:
        return list(dict.fromkeys(s.rollout_id for s in (*self.train, *self.held_out)))

    @property
    def digest(self) -> str:
        """Return a digest that is equal for two traces exactly if they have the same rows."""
        rows = [[(s.rollout_id, s.token_ids, s.mask) for s in part] for part in (self.train, self.held_out)]
        return hashlib.sha256(repr(rows).encode()).hexdigest()


class TraceReader:
    """Reads traces from the store. It claims nothing, so RL can still train on the same rollouts."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        vocabulary: int | None = None,
    ) -> None:
        """A row has at most `max_tokens` tokens. `vocabulary` is the number of the model's tokens (None: any)."""
        self._config = config
        self._store = store
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._agents = TrainedAgents(config.agents)
        self._roll_call = RollCall(self._agents)

    async def read(self, among: Collection[str] | None = None) -> Traces:
        """Return the best rollouts of each task, among all or `among` these. Raises NothingToLearn without any.

        The best have at least the reward `sft.min_reward`; the highest come first, and the newest among equals. At most
        `sft.top` of a task are taken, no two of them with the same tokens.
        """
        seen = Seen()
        rewarded = [r for r in await self._rewarded() if among is None or r.rollout.rollout_id in among]
        for one in rewarded:
            seen.reward(one.rollout.task_id, one.reward)
        tasks: dict[str, list[Rewarded]] = {}
        for good in sorted((r for r in rewarded if self._is_good(r.reward)), key=lambda r: -r.reward):
            tasks.setdefault(good.task, []).append(good)
        if not tasks:
            raise NothingToLearn(self._why_none_is_good([r.reward for r in rewarded]))
        found = [rows for task in sorted(tasks, key=self._order) if (rows := await self._best(tasks[task], seen))]
        if not found:
            raise NothingToLearn(_why_no_rows(sum(map(len, tasks.values())), seen))
        return self._split(found, seen)

    async def _rewarded(self) -> list[Rewarded]:
        """Completed rollouts of mode train with a reward that counts (`reward_weights`), newest first.

        Those that a reward function is still to be asked about have not got all of theirs.
        """
        found: list[Rewarded] = []
        awaiting = set(await self._store.endings.awaiting())
        cursor: int | None = None
        while True:
            page, cursor = await self._store.rollouts.page({"mode": "train", "status": "completed"}, PAGE, cursor)
            for rollout in (r for r in page if r.rollout_id not in awaiting):
                posted = await self._store.rewards.of(rollout.rollout_id)
                reward = weighted_rewards(posted, self._config.reward_weights).posted
                found += [] if reward is None else [Rewarded(rollout, reward)]
            if cursor is None:
                return found

    def _is_good(self, reward: float) -> bool:
        least = self._config.sft.min_reward
        return reward > 0 if least is None else reward >= least

    async def _best(self, rollouts: Sequence[Rewarded], seen: Seen) -> list[tuple[Sample, ...]]:
        """The rows of a task's best rollouts that differ and can be learned from; `rollouts` come best first."""
        found: dict[Any, tuple[Sample, ...]] = {}
        for rollout, _ in rollouts:
            rows = await self._rows(rollout, seen)
            if rows:
                found.setdefault(tuple((s.token_ids, s.mask) for s in rows), rows)
            if len(found) == self._config.sft.top:
                break
        return list(found.values())

    async def _rows(self, rollout: Rollout, seen: Seen) -> tuple[Sample, ...]:
        try:
            calls = await self._store.calls.of(rollout.rollout_id)
        except NotFound:  # deleted meanwhile
            return ()
        self._roll_call.look([calls])
        trained = [call for call in calls if self._agents.role(call.agent) is not None]
        seen.counts["calls_of_others"] += len(calls) - len(trained)
        found = [as_trace(call, self._tokenizer) for call in trained]
        traces = [trace for trace in found if trace is not None]
        seen.counts["calls_untokenised"] += len(found) - len(traces)
        task = rollout.task_id or rollout.rollout_id
        made = rollout_samples(
            traces,
            [0.0] * len(traces),
            task_id=task,
            max_tokens=self._max_tokens,
            vocabulary=self._vocabulary,
            sampled=lambda _: Sampling(),  # however: what is imitated is the text
        )
        seen.counts.update(made.counts)
        return made.samples

    def _order(self, task: str) -> bytes:
        """A sort key that looks random, and is the same in every process. The first tasks are held out."""
        return hashlib.sha256(f"{self._config.seed} {task}".encode()).digest()

    def _split(self, tasks: Sequence[list[tuple[Sample, ...]]], seen: Seen) -> Traces:
        held = int(self._config.sft.held_out * len(tasks))
        parts = [[rows for task in part for rows in task] for part in (tasks[held:], tasks[:held])]
        train, held_out = (tuple(sample for rows in part for sample in rows) for part in parts)
        metrics = seen.metrics() | {
            "groups": float(len(seen.rewards)),
            "groups_trained": float(len(tasks) - held),
            "groups_held_out": float(held),
            "rollouts_trained": float(len(parts[0])),
            "samples": float(len(train)),
            "calls_untokenised": float(seen.counts["calls_untokenised"]),
        }
        return Traces(train, held_out, metrics)

    def _why_none_is_good(self, rewards: Sequence[float]) -> str:
        if not rewards:
            return "nothing to learn from: no rollout of mode train is completed and has a reward"
        least = self._config.sft.min_reward
        wanted = "above 0" if least is None else f"of at least {least:g}"
        return (
            f"nothing to learn from: none of {len(rewards)} rollouts has a reward {wanted}; theirs are from "
            f"{min(rewards):g} to {max(rewards):g}, {fmean(rewards):.3g} on average (trainer.sft.min_reward, "
            "--min-reward)"
        )


def _why_no_rows(rollouts: int, seen: Seen) -> str:
    reasons = [f"{seen.counts[name]} calls {what}" for name, what in LEFT_OUT.items() if seen.counts[name]]
    return (
        f"nothing to learn from: {rollouts} rollouts have a reward that is high enough, and no call of theirs can be "
        f"learned from: {', '.join(reasons) or 'they have none'}"
    )
