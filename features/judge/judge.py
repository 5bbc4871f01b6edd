"""The rewarder `judge`: an LLM scores each call of a rollout. Its scores are rewards of the calls, named `judge`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...core.errors import ConfigError
from ...core.http import in_thread_if_large
from ...core.prices import import_litellm, require_litellm
from ...proxy.api.views import answer_in
from .config import CallsConfig
from .model import IS_DATA, fenced, mark_for
from .rewarder import Away, GivenScore, Json, Rewarder, decisions, together
from .table import KeptAnswers, Used

JUDGE = "judge"
MAX_TEXT = 2000  # characters of a message that the judge is shown
UNDECIDED = 0.5
INSTRUCTIONS = """\
Below are the steps of an agent that works on a task: what it saw last, and what it answered.
Judge how much each step helped the task on. You are asked for one step at a time.
Answer with one whole number only, from 0 (it did harm) over 5 (neither) to 10 (it was just what was needed)."""


class Unjudgeable(Exception):
    """The judge will never answer this question: it is too long, or breaks its provider's rules."""


class Judge(Rewarder):
    """Asks the model `judge.calls.model`, through litellm, for a score of each call."""

    name = JUDGE
    label = "judge.calls"

    def __init__(
        self, config: CallsConfig, clean: Callable[[str], str] = str, answers: KeptAnswers | None = None
    ) -> None:
        """`clean` takes secrets out of what it reads. `answers` are kept, and counted for the budget."""
        self._clean, self._answers = clean, answers
        self._used: dict[str, tuple[Used, float | None]] = {}  # by the question, what its answer used and cost
        self._config, self.at_once = config, config.concurrency
        self._slots = asyncio.Semaphore(config.concurrency)

    async def check(self) -> None:
        require_litellm("judge.use: judge")
        if self._config.model is None:
            raise ConfigError("judge.use: judge: set judge.calls.model, as litellm names it")

    async def require(self) -> None:
        if self._answers is not None:
            await self._answers.require()

    async def source(self) -> str:
        return self._config.model or ""

    async def scores(self, rollout: Json) -> list[GivenScore]:
        steps, source = decisions(rollout), await self.source()
        known = {one["call_id"] for one in rollout["rewards"] if one["name"] == JUDGE and one["source"] == source}
        wanted = [i for i, call in enumerate(steps) if call["call_id"] not in known]
        shown, about = await asyncio.to_thread(transcript, steps, self._clean), [rollout["rollout_id"]]
        found = zip(wanted, await together(self.score(shown, i, about) for i in wanted), strict=True)
        return [GivenScore(one.value, one.comment, JUDGE, steps[i]["call_id"]) for i, one in found]

    async def score(self, shown: str, step: int, about: Sequence[str] = ()) -> GivenScore:
        """Return the score of one step of a transcript: undecided if the answer has none. Raise Away."""
        async with self._slots:
            try:
                answer = await self._once(question(shown, step), about)
            except Unjudgeable as error:
                return GivenScore(UNDECIDED, f"no score: {str(error)[:200]}")
        score = read_score(answer)
        if score is None:
            return GivenScore(UNDECIDED, f"no number in the answer: {answer[:200]}")
        return GivenScore(score, answer[:200])

    async def _once(self, question: str, about: Sequence[str]) -> str:
        """The answer, from before if it was asked this."""
        if self._answers is None:
            return await self._ask(question)
        asked = f"{self._config.model}\n{INSTRUCTIONS}\n{question}"
        digest = await in_thread_if_large(
            len(asked), lambda: hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()
        )
        if (known := await self._answers.known(digest)) is not None:
            return known
        await self._answers.require()
        self._answers.under_way.append(guess := (len(question) // 4, 0))
        try:
            answer = await self._ask(question)
        finally:
            self._answers.under_way.remove(guess)
        guess = (guess[0], len(answer) // 4)
        await self._answers.spend(*self._used.pop(question, (guess, None)))
        await self._answers.keep(digest, answer, about)
        return answer

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
            raise Away(f"judge.calls: {config.model} gives no answer: {str(error)[:300]}") from None
        text = "".join(choice.message.content or "" for choice in answer.choices[:1])
        if self._answers is not None and (usage := getattr(answer, "usage", None)) and usage.total_tokens:
            self._used[question] = (usage.prompt_tokens, usage.completion_tokens), usd_of(litellm, answer)
        return text


def usd_of(litellm: Any, answer: Any) -> float | None:
    """What an answer cost by litellm's prices; None without one."""
    try:
        return float(litellm.completion_cost(answer)) or None
    except Exception:  # of many kinds, where the model is not in its table
        return None


def transcript(steps: Sequence[Json], clean: Callable[[str], str] = str) -> str:
    """Return every step in clean words: the model's last input and its answer. Long ones are cut."""
    texts = [
        f"saw: {_text(_seen(call['request']), clean)}\nanswered: {_text(answer_in(call['response']), clean)}"
        for call in steps
    ]
    mark = mark_for([texts])
    steps_of = (fenced(mark, f"Step {i}", text) for i, text in enumerate(texts, 1))
    return "\n\n".join([IS_DATA.format(mark=mark), *steps_of])


def question(shown: str, step: int) -> str:
    """Return the question about one step of a transcript, counted from 0."""
    return f"{shown}\n\nThe number for step {step + 1}:"


def read_score(answer: str) -> float | None:
    """Return the first number from 0 to 10 in an answer, as 0 to 1; None without one. "Step 3" does not count."""
    text = re.sub(r"step \d+", "", answer.rpartition("</think>")[2], flags=re.IGNORECASE)
    numbers = (float(found) for found in re.findall(r"\d+(?:\.\d+)?", text))
    return next((number / 10 for number in numbers if number <= 10), None)


def _seen(request: Json) -> object:
    conversation = request.get("messages", request.get("input", request.get("prompt")))
    return conversation[-1:] if isinstance(conversation, list) else conversation


def _text(value: object, clean: Callable[[str], str]) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = clean(text.encode(errors="replace").decode())  # lone surrogates cannot be sent
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} […]"
