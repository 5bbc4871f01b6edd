"""The lessons of a run of fine-tuning, read off rewarded rollouts: rows, or pairs of them, or rows with thumbs.

Reading claims nothing, so RL can still train on these rollouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from ...core.config.trainer import TrainerConfig
from ...core.errors import LightningError, NotFound
from ...core.records import Choice, ModelCall, Rollout
from ...core.returns import Rules
from ...core.tokens import can_be_imitated
from ...store.store import Store
from ...trainer.credit.agents import RollCall, TrainedAgents
from ...trainer.report.batch_metrics import Seen
from ...trainer.rows.samples import rollout_samples
from ...trainer.types import Sample, Sampling, Sift, Sifted

# A lesson: a row, or a tuple with rows in it. The first is of an answer that is to become likelier, if any is.
T = TypeVar("T", bound=Sample | tuple[Any, ...])
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
# Gives a call the tokens to learn from; None if it needs some and cannot have them.
AsLesson = Callable[[ModelCall], ModelCall | None]


@dataclass(frozen=True)
class Lessons(Generic[T]):
    """Lessons to learn from, and lessons of other tasks to measure on; `metrics` counts how they came about."""

    train: tuple[T, ...]
    held_out: tuple[T, ...]
    metrics: dict[str, float]

    @property
    def rows(self) -> list[Sample]:
        """Return all rows to learn from."""
        return [row for one in self.train for row in rows_of(one)]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Return rows whose prompts vLLM answers when the new weights are verified: the first of each lesson."""
        return tuple(rows_of(one)[0] for one in self.train)

    @property
    def rollout_ids(self) -> list[str]:
        return list(dict.fromkeys(row.rollout_id for one in (*self.train, *self.held_out) for row in rows_of(one)))

    @property
    def digest(self) -> str:
        """Return a digest that is equal for two exactly if they have the same lessons."""
        shown = [[_shown(one) for one in part] for part in (self.train, self.held_out)]
        return hashlib.sha256(repr(shown).encode()).hexdigest()


def rows_of(lesson: Sample | tuple[Any, ...]) -> list[Sample]:
    """Return the rows in a lesson."""
    return [part for part in _parts(lesson) if isinstance(part, Sample)]


def lessons_of(tasks: Sequence[Sequence[T]], held_out: float, seen: Seen, **counts: float) -> Lessons[T]:
    """Return the lessons of tasks, of which the first are only measured on: a share of `held_out`.

    A rollout without a task is learned from or measured on by itself, and is no group.
    """
    held = int(held_out * len(tasks))
    measured, learned = tasks[:held], tasks[held:]
    train, rest = (tuple(one for task in part for one in task) for part in (learned, measured))
    rows = [row for one in train for row in rows_of(one)]
    metrics = seen.metrics() | counts | {
        "groups": float(seen.groups),
        "groups_trained": _groups(learned),
        "groups_held_out": _groups(measured),
        "rollouts_trained": float(len({row.rollout_id for row in rows})),
        "samples": float(len(rows)),
    }  # fmt: skip
    return Lessons(train, rest, metrics)


def _groups(tasks: Sequence[Sequence[Sample | tuple[Any, ...]]]) -> float:
    firsts = [rows_of(task[0])[0] for task in tasks]
    return float(sum(row.task_id != row.rollout_id for row in firsts))


def _parts(lesson: Sample | tuple[Any, ...]) -> tuple[Any, ...]:
    return (lesson,) if isinstance(lesson, Sample) else lesson


def _shown(lesson: Sample | tuple[Any, ...]) -> list[Any]:
    parts = _parts(lesson)
    return [(one.rollout_id, one.token_ids, one.mask) if isinstance(one, Sample) else one for one in parts]


class NothingToLearn(LightningError):
    """No rollout in the store can be learned from."""


class RewardedRollout(NamedTuple):
    """A completed rollout and its reward. `owner`: the key that sees only its own rollouts, if it is such a key's."""

    rollout: Rollout
    reward: float
    owner: str | None = None

    @property
    def task(self) -> str:
        """Return the task's id; the rollout's own if it has no task."""
        return self.rollout.task_id or self.rollout.rollout_id

    @property
    def siblings(self) -> str:
        """Return a name for the rollouts that it may be compared with: of its task, and not of another tenant."""
        return self.task if self.owner is None else f"{self.task} {self.owner}"


class RolloutReader:
    """Reads completed rollouts of mode train, the rewards that count, and the rows of trained agents' calls."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        as_lesson: AsLesson,
        max_tokens: int,
        vocabulary: int | None = None,
        sift: Sift | None = None,
    ) -> None:
        """A row has at most `max_tokens` tokens. `vocabulary` is the number of the model's tokens (None: any)."""
        self._config = config
        self._store = store
        self._as_lesson = as_lesson
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._sift = sift or Sifted
        self._agents = TrainedAgents(config.agents)
        self._roll_call = RollCall(self._agents)

    async def rewarded(self, among: Collection[str] | None, seen: Seen) -> list[RewardedRollout]:
        """Return rollouts with a reward that counts (`reward_weights`), newest first; all, or those `among` these.

        Rollouts that still await a reward function lack some of theirs.
        """
        await self._store.rewards.use(Rules.of(self._config))
        found: list[RewardedRollout] = []
        awaiting = await self._store.rollouts.awaiting()
        cursor: int | None = None
        while True:
            page, cursor = await self._store.rollouts.page({"mode": "train", "status": "completed"}, PAGE, cursor)
            owners = await self._store.waiting.owners(rollout.rollout_id for rollout in page)
            for rollout in (r for r in page if r.rollout_id not in awaiting):
                reward = rollout.reward
                if reward is not None and (among is None or rollout.rollout_id in among):
                    seen.reward(rollout.task_id, reward)
                    found.append(RewardedRollout(rollout, reward, owners.get(rollout.rollout_id)))
            if cursor is None:
                return found

    async def rows(self, rollout: Rollout, seen: Seen) -> tuple[Sample, ...]:
        """Return the rows of a rollout that can be learned from; none if it was deleted meanwhile."""
        try:
            calls = await self._store.calls.of(rollout.rollout_id)
        except NotFound:
            return ()
        self._roll_call.look([calls])
        sifted = self._sift(calls)
        seen.counts.update(sifted.counts)
        trained = {i for i, call in enumerate(calls) if self._agents.role(call.agent) is not None}
        seen.counts["calls_of_others"] += len(calls) - len(trained)
        found = [self._as_lesson(calls[i]) for i in sorted(trained - sifted.left_out - sifted.negative)]
        lessons = [lesson for lesson in found if lesson is not None]
        seen.counts["calls_untokenised"] += len(found) - len(lessons)
        made = rollout_samples(
            lessons,
            [0.0] * len(lessons),
            task_id=rollout.task_id or rollout.rollout_id,
            max_tokens=self._max_tokens,
            vocabulary=self._vocabulary,
            sampled=lambda _: Sampling(),  # however it was sampled: the text is learned
        )
        seen.counts.update(made.counts)
        return made.samples

    def in_order(self, tasks: Collection[str]) -> list[str]:
        """Return tasks in an order that looks random, and is the same in every process."""
        return sorted(tasks, key=lambda task: hashlib.sha256(f"{self._config.seed} {task}".encode()).digest())


def has_own_tokens(call: ModelCall) -> bool:
    """Return whether the policy's own tokens are known, however they were sampled."""
    return call.trainable or can_be_imitated(call.untrainable_reason)


def with_tokens(call: ModelCall, prompt: Sequence[int], answer: Sequence[int]) -> ModelCall:
    """Return the call with these tokens to learn from, at log-probability 0."""
    choice = Choice(0, tuple(answer), (0.0,) * len(answer), call.finish_reason)
    return replace(call, prompt_token_ids=tuple(prompt), choices=(choice,), trainable=True, untrainable_reason=None)


def as_sampled(call: ModelCall) -> ModelCall:
    """Return the call with the policy's own tokens, however they were sampled; unchanged if it has none."""
    return with_tokens(call, call.prompt_token_ids, call.response_token_ids) if has_own_tokens(call) else call


def what_was_left_out(seen: Seen) -> str:
    """Return in words which calls cannot be learned from, and why; "" if all can."""
    reasons = [f"{seen.counts[name]} calls {what}" for name, what in LEFT_OUT.items() if seen.counts[name]]
    return ", ".join(reasons)
