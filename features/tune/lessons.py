"""Reads the lessons of a fine-tuning run from rewarded rollouts.

Reading claims nothing: RL can still train on these rollouts. `sft` takes the best answers to each task, as RAFT does
(https://arxiv.org/abs/2304.06767), without duplicates: different answers teach more (https://arxiv.org/abs/2308.01825).
`dpo` takes pairs of siblings with different rewards, `kto` every row, labelled by whether its rollout is good.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ...core.errors import LightningError, NotFound
from ...core.records import Choice, ModelCall, Rollout
from ...core.returns import Rules
from ...core.tokens import NO_TOKEN_IDS, NOT_THE_POLICY, can_be_imitated
from ...store.store import Store
from ...trainer.credit.agents import RollCall, TrainedAgents
from ...trainer.report.batch_metrics import Seen
from ...trainer.rows.samples import rollout_samples
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Sample, Sampling, Sift, Sifted
from .config import DpoConfig, KtoConfig, SftConfig, TuneConfig

PAGE = 500
HELD_OUT = 0.1  # of the tasks, which are only measured on
# The counts of what is left out, and how an error describes each.
LEFT_OUT = {
    "calls_untrainable": "calls without tokens to learn from",
    "calls_other_tokens": "calls with tokens that the model does not have",
    "calls_untokenised": "calls of other models that the policy's chat template cannot render",
    "calls_ambiguous": "calls with several answers",
    "calls_of_others": "calls of agents that trainer.agents does not name",
    "rows_too_long": "calls longer than trainer.max_sample_tokens or the model's context",
    "pairs_other_prompt": "pairs with different prompts",
}


class NothingToLearn(LightningError):
    """The store's rollouts give no lesson to train on (for `kto`: fewer than two)."""


class Example(NamedTuple):
    """One row, or a chosen and a rejected row with the same prompt. `up`: the first row should become likelier."""

    rows: tuple[Sample, ...]
    up: bool = True


@dataclass(frozen=True)
class Lessons:
    """Lessons to learn from, and lessons of held-out tasks to measure on. `metrics`: counts from selecting them."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    metrics: dict[str, float]

    @property
    def rollout_ids(self) -> list[str]:
        return list(dict.fromkeys(row.rollout_id for one in (*self.train, *self.held_out) for row in one.rows))

    @property
    def digest(self) -> str:
        """Return a digest that is equal exactly if the lessons are the same."""
        parts = [
            [(one.up, [(row.rollout_id, row.token_ids, row.mask) for row in one.rows]) for one in part]
            for part in (self.train, self.held_out)
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class LessonReader:
    """Reads a method's lessons from completed training rollouts, using calls of trained agents only."""

    def __init__(self, method: str, store: Store, trainer: LightningTrainer, sift: Sift | None = None) -> None:
        self._method, self._store, self._trainer = method, store, trainer
        self._config = trainer.settings
        self._section: Any = getattr(self._config.section(TuneConfig), method)
        self._sift = sift or Sifted
        self._agents = TrainedAgents(self._config.agents)
        self._roll_call = RollCall(self._agents)
        self._seen = Seen()

    async def read(self, among: Collection[str] | None = None) -> Lessons:
        """Return lessons from all rollouts, or from those in `among`. Raises NothingToLearn if there are too few."""
        self._seen = Seen()
        tasks = await self._rewarded(among)
        choose = {"sft": self._best, "dpo": self._pairs, "kto": self._thumbs}[self._method]
        order = sorted(tasks, key=lambda task: _mixed(self._config.seed, *task))
        chosen = [found for task in order if (found := await choose(tasks[task]))]
        held = int(HELD_OUT * len(chosen))
        held_out, train = ([one for of_task in part for one in of_task] for part in (chosen[:held], chosen[held:]))
        if len(train) < (2 if self._method == "kto" else 1):
            raise NothingToLearn(self._why([one.reward or 0.0 for of_task in tasks.values() for one in of_task]))
        # KTO pairs a prompt with the previous row's answer: neighbours should be of different tasks.
        train.sort(key=lambda one: _mixed(*((row.rollout_id, row.call_ids) for row in one.rows)))
        rows = [row for one in train for row in one.rows]
        groups = [of_task[0].rows[0].task_id != of_task[0].rows[0].rollout_id for of_task in chosen]
        metrics = self._seen.metrics() | {
            "groups": self._seen.groups,
            "groups_trained": sum(groups[held:]),
            "groups_held_out": sum(groups[:held]),
            "rollouts_trained": len({row.rollout_id for row in rows}),
            "samples": len(rows),
        }
        counts, liked = self._seen.counts, sum(one.up for one in train)
        pairs = {"pairs": len(train), "pairs_held_out": len(held_out)}
        metrics |= {
            "sft": {"calls_untokenised": counts["calls_untokenised"]},
            "dpo": pairs | {"pairs_other_prompt": counts["pairs_other_prompt"]},
            "kto": {"thumbs_up": liked, "thumbs_down": len(train) - liked},
        }[self._method]
        return Lessons(tuple(train), tuple(held_out), {name: float(value) for name, value in metrics.items()})

    async def _rewarded(self, among: Collection[str] | None) -> dict[tuple[Any, ...], list[Rollout]]:
        """Rewarded rollouts that await no rewarder, by task and tenant, newest first."""
        await self._store.rewards.use(Rules.of(self._config))
        awaiting = await self._store.rollouts.awaiting()
        tasks: dict[tuple[Any, ...], list[Rollout]] = defaultdict(list)
        cursor: int | None = None
        while True:
            page, cursor = await self._store.rollouts.page({"mode": "train", "status": "completed"}, PAGE, cursor)
            owners = await self._store.waiting.owners(rollout.rollout_id for rollout in page)
            for rollout in page:
                name, task = rollout.rollout_id, rollout.task_id
                if rollout.reward is None or name in awaiting or (among is not None and name not in among):
                    continue
                self._seen.reward(task, rollout.reward)
                tasks[task, None if task else name, owners.get(name)].append(rollout)
            if cursor is None:
                return tasks

    async def _rows(self, rollout: Rollout) -> tuple[Sample, ...]:
        """The rows of a rollout that can be learned from; none if it has been deleted."""
        try:
            calls = await self._store.calls.of(rollout.rollout_id)
        except NotFound:
            return ()
        self._roll_call.look([calls])
        sifted, counts = self._sift(calls), self._seen.counts
        counts.update(sifted.counts)
        trained = {i for i, call in enumerate(calls) if self._agents.role(call.agent) is not None}
        counts["calls_of_others"] += len(calls) - len(trained)
        tokenizer = self._trainer.tokenizer if self._method == "sft" else None
        made = [as_lesson(calls[i], tokenizer) for i in sorted(trained - sifted.left_out - sifted.negative)]
        found = [call for call in made if call is not None]
        counts["calls_untokenised"] += len(made) - len(found)
        rows = rollout_samples(
            found, [0.0] * len(found), task_id=rollout.task_id or rollout.rollout_id,
            max_tokens=self._trainer.max_tokens, vocabulary=self._trainer.vocabulary,
            sampled=lambda _: Sampling(),  # however it was sampled: the text is learned
        )  # fmt: skip
        counts.update(rows.counts)
        return rows.samples

    async def _best(self, siblings: Sequence[Rollout]) -> list[Example]:
        """The rows of a task's best rollouts, newest first among equals, without duplicates."""
        config: SftConfig = self._section
        least, found = config.min_reward, dict[Any, tuple[Sample, ...]]()
        for rollout in sorted(siblings, key=lambda one: -(one.reward or 0.0)):
            reward = rollout.reward or 0.0
            if len(found) == config.top or (reward <= 0 if least is None else reward < least):
                break
            if rows := await self._rows(rollout):
                found.setdefault(tuple((row.token_ids, row.mask) for row in rows), rows)
        return [Example((row,)) for rows in found.values() for row in rows]

    async def _pairs(self, siblings: Sequence[Rollout]) -> list[Example]:
        """The pairs of a task, largest difference in reward first. Only the first row of each rollout is used."""
        config: DpoConfig = self._section
        rewards = [one.reward or 0.0 for one in siblings]
        if max(rewards) - min(rewards) < config.margin:
            return []
        ranked = sorted(zip(rewards, siblings, strict=True), key=lambda one: -one[0])
        first = [(reward, rows[0]) for reward, one in ranked if (rows := await self._rows(one))]
        apart = [(a - b, better, worse) for (a, better), (b, worse) in combinations(first, 2) if a - b >= config.margin]
        distinct: dict[Any, Example] = {}
        for _, better, worse in sorted(apart, key=lambda pair: -pair[0]):
            if better.token_ids != worse.token_ids:
                distinct.setdefault((better.token_ids, worse.token_ids), Example((better, worse)))
        found = [pair for pair in distinct.values() if len({prompt_of(row) for row in pair.rows}) == 1]
        self._seen.counts["pairs_other_prompt"] += len(distinct) - len(found)
        return found[: config.pairs_per_task]

    async def _thumbs(self, siblings: Sequence[Rollout]) -> list[Example]:
        config: KtoConfig = self._section
        return [
            Example((row,), (one.reward or 0.0) > config.threshold) for one in siblings for row in await self._rows(one)
        ]

    def _why(self, rewards: Sequence[float]) -> str:
        """Explain why there is nothing to learn from."""
        config = self._config.section(TuneConfig)
        least = "above 0" if config.sft.min_reward is None else f"of at least {config.sft.min_reward:g}"
        rule = {
            "sft": f"imitates those with a reward {least} (tune.sft.min_reward)",
            "dpo": f"compares siblings with rewards that differ by {config.dpo.margin:g} or more (tune.dpo.margin)",
            "kto": "needs two rows to learn from",
        }[self._method]
        seen = f" (from {min(rewards):g} to {max(rewards):g})" if rewards else ""
        reasons = [f"{self._seen.counts[name]} {what}" for name, what in LEFT_OUT.items() if self._seen.counts[name]]
        left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
        return (
            f"nothing to learn from: {len(rewards)} rollouts of mode train are completed and have a reward{seen}; "
            f"--method {self._method} {rule}{left_out}"
        )


def prompt_of(row: Sample) -> tuple[int, ...]:
    """Return the tokens before the first answer."""
    return row.token_ids[: row.mask.index(1)]


def _mixed(*what: object) -> bytes:
    """A sort key that looks random, and is the same in every process."""
    return hashlib.sha256(repr(what).encode()).digest()


def as_lesson(call: ModelCall, tokenizer: PreTrainedTokenizerBase | None) -> ModelCall | None:
    """Return the call with tokens to learn from, or unchanged if it is unusable; None if it cannot be rendered."""
    prompt, answer = call.prompt_token_ids, call.response_token_ids
    if not (call.trainable or can_be_imitated(call.untrainable_reason)):
        is_foreign = call.untrainable_reason in (NOT_THE_POLICY, NO_TOKEN_IDS)
        if tokenizer is None or not is_foreign or not call.is_decision or len(call.choices) > 1:
            return call
        try:
            prompt, answer = _tokenised(call, tokenizer)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError):  # of a template, or of a message
            return None
    choice = Choice(0, answer, (0.0,) * len(answer), call.finish_reason)
    return replace(call, prompt_token_ids=prompt, choices=(choice,), trainable=True, untrainable_reason=None)


def _tokenised(call: ModelCall, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of prompt and answer, tokenised separately. The answer has an end token unless it was cut off."""
    if call.endpoint != "chat/completions":
        raise ValueError("the call is not a chat completion")
    (choice,), request = call.response["choices"], call.request
    options = {"tools": request.get("tools"), "tokenize": False, **(request.get("chat_template_kwargs") or {})}
    shown, encode = (
        partial(tokenizer.apply_chat_template, **options),
        partial(tokenizer.encode, add_special_tokens=False),
    )
    messages = [_as_shown(message) for message in request["messages"]]
    prompt, text = shown(messages, add_generation_prompt=True), shown([*messages, _as_shown(choice["message"])])
    if not text.startswith(prompt):
        raise ValueError("the answer does not follow the prompt")
    answer, end = encode(text[len(prompt) :]), tokenizer.eos_token_id
    if end is not None:
        last = len(answer) - 1 - answer[::-1].index(end) if end in answer else len(answer)
        answer = answer[:last] + ([] if choice.get("finish_reason") == "length" else [end])
    return tuple(encode(prompt)), tuple(answer)


def _as_shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM passes it to a template: text as one string, a tool call's arguments as an object."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    shown = {name: value for name, value in message.items() if value is not None} | {"content": content or ""}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        parsed = [function | {"arguments": json.loads(function["arguments"] or "{}")} for function in functions]
        shown["tool_calls"] = [call | {"function": own} for call, own in zip(calls, parsed, strict=True)]
    return shown
