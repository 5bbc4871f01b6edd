"""An LLM judge that scores every call of a rollout, once. Its scores are stored as rewards named `judge`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence

from ...proxy.control.transitions import message_of
from ...proxy.judge.config import JudgeKeys
from ...proxy.providers import import_litellm
from ...proxy.store.store import Store
from ...proxy.types import ModelCall, Reward
from ..credit.agents import TrainedAgents
from ..credit.rewards import JUDGE
from ..credit.strategies import strategy_of
from ..waiting import JudgeError

MAX_TEXT = 2000  # characters of a message that the judge is shown
UNDECIDED = 0.5
INSTRUCTIONS = """\
Below are the steps of an agent that works on a task: what it saw last, and what it answered.
Judge how much each step helped the task on. You are asked for one step at a time.
Answer with one whole number only, from 0 (it did harm) over 5 (neither) to 10 (it was just what was needed)."""


class Unjudgeable(Exception):
    """The judge will never answer this question: it is too long, or breaks its provider's rules."""


class Judge:
    """Asks the model `trainer.judge.model`, through litellm, to score calls that it has not scored yet."""

    def __init__(self, config: JudgeKeys, store: Store) -> None:
        self._config = config.judge
        self._agents = TrainedAgents(config.agents)
        self._credit = config.credit
        self._store = store
        self._slots = asyncio.Semaphore(config.judge.concurrency)

    async def missing(self, calls: Sequence[ModelCall], rewards: Sequence[Reward]) -> list[Reward]:
        """Score the calls of a rollout that this model has not scored yet; store and return the scores.

        Raises JudgeError. The scores until then are stored.
        """
        known = {r.call_id for r in rewards if r.name == JUDGE and r.source == self._config.model}
        steps = [call for call in calls if call.is_decision]
        wanted = [
            (i, call) for i, call in enumerate(steps) if call.call_id not in known and self._is_judged(call.agent)
        ]
        shown = transcript(steps) if wanted else ""
        try:
            async with asyncio.TaskGroup() as group:  # the first error ends them all
                scored = [group.create_task(self._score(call, i, shown)) for i, call in wanted]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in scored]

    def _is_judged(self, agent: str | None) -> bool:
        return self._agents.role(agent) is not None and strategy_of(agent, self._credit) == JUDGE

    async def _score(self, call: ModelCall, step: int, shown: str) -> Reward:
        async with self._slots:
            score, comment = await self._judged(question(shown, step))
        reward = Reward(
            call.rollout_id,
            UNDECIDED if score is None else score,
            call.call_id,
            name=JUDGE,
            source=self._config.model,
            comment=comment,
            final=False,
        )
        await self._store.rewards.post([reward], None, b"")
        return reward

    async def _judged(self, question: str) -> tuple[float | None, str]:
        """The score and the judge's answer. The score is None if the answer has none, or this cannot be judged."""
        try:
            answer = await self._ask(question)
        except Unjudgeable as error:
            return None, f"no score: {str(error)[:200]}"
        score = read_score(answer)
        return score, answer[:200] if score is not None else f"no number in the answer: {answer[:200]}"

    async def _ask(self, question: str) -> str:
        litellm, config = import_litellm(), self._config
        from openai import OpenAIError

        messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
        try:
            answer = await litellm.acompletion(
                config.model, messages, api_base=config.api_base, timeout=config.timeout_s, num_retries=2,
                temperature=0, drop_params=True,  # reasoning models take no temperature
            )  # fmt: skip
        except (litellm.ContextWindowExceededError, litellm.ContentPolicyViolationError) as error:
            raise Unjudgeable(str(error)) from None
        except OpenAIError as error:  # what all of litellm's errors are
            raise JudgeError(f"trainer.judge: {config.model} gives no answer: {str(error)[:300]}") from None
        return "".join(choice.message.content or "" for choice in answer.choices[:1])


def transcript(steps: Sequence[ModelCall]) -> str:
    """Return every step in words: the model's last input and its answer. Long ones are cut."""
    return "\n\n".join(
        f"Step {i}\nsaw: {_text(_seen(call))}\nanswered: {_text(message_of(call))}" for i, call in enumerate(steps, 1)
    )


def question(shown: str, step: int) -> str:
    """Return the question about one step of a transcript, counted from 0."""
    return f"{shown}\n\nThe number for step {step + 1}:"


def read_score(answer: str) -> float | None:
    """Return the first number from 0 to 10 in an answer, as 0 to 1; None without one. "Step 3" does not count."""
    text = re.sub(r"step \d+", "", answer.rpartition("</think>")[2], flags=re.IGNORECASE)
    numbers = (float(found) for found in re.findall(r"\d+(?:\.\d+)?", text))
    return next((number / 10 for number in numbers if number <= 10), None)


def _seen(call: ModelCall) -> object:
    conversation = call.request.get("messages", call.request.get("input", call.request.get("prompt")))
    return conversation[-1:] if isinstance(conversation, list) else conversation


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(errors="replace").decode()  # lone surrogates cannot be sent
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} […]"
