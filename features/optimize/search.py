"""Searches for a better prompt, by GEPA or APO: tasks, scores and reflections in, the best prompt out.

One look at each validation task is little: of true rates 0.20 and 0.85, both may be right on 3 of 6 tasks. So the
search looks again at the best versions as long as they cannot be told apart and budget is left.

`gepa`: reflective mutation, and a Pareto front over tasks (arXiv 2507.19457), by its authors' package.
`apo`: textual gradients and beam search (ProTeGi, arXiv 2305.03495). A critic reads a few rollouts and says what is
wrong with the prompt, the textual gradient. An editor rewrites the prompt. The best prompts enter the next round.

A search always runs from its beginning. What it did before, its store and its file of reflections know, so it repeats
that at no cost.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pvariance
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from ...commands.api_client import ApiClient
from ...commands.run.run import RolloutResult, RunOptions, run_tasks
from ...commands.run.runner import Runner
from ...commands.run.tasks import Task
from ...core.errors import ConfigError, LightningError
from ...core.prices import Used, import_litellm, used
from ...core.tools import calls_in
from ...proxy.dialects.transcript import chat_turns, text
from ...store.sqlite.file import make_private

NEAR = 2.0  # standard errors, within which one mean is not better than another
AT_MOST = 4  # versions that are looked at again
TIMEOUT_S = 300.0
MOST = 6_000  # characters of one text
CRITIC = """You improve the prompt of an agent. This is the prompt:

<prompt>
{prompt}
</prompt>

These are some of the agent's runs with it, each with what came of it:

{runs}

Say what in the prompt led to low rewards, and what is missing in it. Be specific: name the failure, the words of the
prompt that caused it, and what would prevent it. Do not write a new prompt."""
EDITOR = """You improve the prompt of an agent. This is the prompt:

<prompt>
{prompt}
</prompt>

A critic, who has read runs of the agent, says:

<critique>
{critique}
</critique>

Rewrite the prompt so that it answers the critique. Keep what works, and every placeholder. Answer with the new prompt
alone, between <prompt> and </prompt>."""
Json = Mapping[str, Any]
T = TypeVar("T")


class BudgetSpent(Exception):
    """The rollouts, or the reflections, that the search may take are used up."""


class Score(NamedTuple):
    """The reward of one rollout."""

    rollout_id: str
    reward: float


class Candidate(NamedTuple):
    """A version of the prompt that was tried. `mean`: over the validation tasks."""

    version: int
    text: str
    mean: float


@dataclass(frozen=True, slots=True)
class Split:
    """Tasks to learn from, tasks to compare candidates on, and tasks that the search never sees."""

    lessons: list[Task]
    validation: list[Task]
    held_out: list[Task]


class Search:
    """Tries versions of a prompt. Rollouts are kept in the store under the name of the `run`.

    A version that was tried on a task is not tried on it again, but by another look. `budget`: rollouts that the search
    may take, those of an earlier start included. `tell` is called with each candidate that is better than all before.
    """

    def __init__(
        self, api: ApiClient, runner: Runner, options: RunOptions, *, prompt: str, run: str, budget: int,
        failed_reward: float, split: Split, seed: int, tell: Callable[[Candidate], None],
        on_result: Callable[[RolloutResult], None],
    ) -> None:  # fmt: skip
        self.split, self.seed, self.prompt, self.budget = split, seed, prompt, budget
        self._api, self._runner, self._options = api, runner, options
        self._run, self._failed_reward, self._tell, self._on_result = run, failed_reward, tell, on_result
        self._known = defaultdict[tuple[int, str], list[Score]](list)  # one for each look
        self.tried: dict[int, Candidate] = {}
        self.taken = 0  # rollouts of the search

    async def open(self) -> None:
        """Read what earlier starts of the run have tried; end the rollouts that they left running."""
        route = f"/prompts/{self.prompt}/rollouts"
        for one in (await self._api.request("GET", route, params={"run": self._run}))["data"]:
            if one["status"] == "running":
                await self._api.end_rollout(one["rollout_id"], "discarded", "the optimisation was stopped")
            elif one["status"] != "discarded":
                self.taken += not one["held_out"]
                failed = one["status"] == "failed"
                if failed or one["reward"] is not None:  # another one takes the place of one without a reward
                    self._add(one["version"], one["task_id"], one["rollout_id"], one["reward"], failed)

    @property
    def best(self) -> Candidate:
        """Return the best candidate so far; of equals, the first."""
        return max(self.tried.values(), key=lambda one: (one.mean, -one.version))

    async def version_of(self, text: str, parent: int | None = None, comment: str | None = None) -> int:
        """Return the version with this text; it is added if there is none."""
        body = {"name": self.prompt, "text": text, "parent": parent, "comment": comment}
        return int((await self._api.request("POST", "/prompts", body))["version"])

    async def scores(
        self, version: int, tasks: Sequence[Task], look: int = 0, *, held_out: bool = False
    ) -> list[Score]:
        """Return the version's rewards on the tasks, in their order, at its `look`th look.

        Raise BudgetSpent before it runs any. `held_out`: it is no part of the search, and not of its budget.
        """
        missing = [task for task in tasks if len(self._known[version, task.task_id]) <= look]
        if not held_out and len(missing) > max(self.budget - self.taken, 0):
            raise BudgetSpent
        choice = {"prompts": {self.prompt: version}, "metadata": {"optimize": self._run, "held_out": held_out}}
        options = replace(self._options, choice=choice)
        for one in await run_tasks(self._api, missing, self._runner, options, self._on_result):
            self.taken += not held_out
            self._add(version, one.task_id, one.rollout_id, one.reward, one.failed)
        return [self._known[version, task.task_id][look] for task in tasks]

    def _add(self, version: int, task_id: str, rollout_id: str, reward: float | None, failed: bool) -> None:
        if reward is None and not failed:
            raise LightningError(f"rollout {rollout_id} has no reward: the agent posts one to /reward before it ends")
        self._known[version, task_id].append(Score(rollout_id, self._failed_reward if reward is None else reward))

    async def validate(self, version: int, text: str) -> Candidate:
        """Return the version with its mean reward over the validation tasks. Raise BudgetSpent."""
        if version not in self.tried:
            scores = await self.scores(version, self.split.validation)
            self._weigh(Candidate(version, text, fmean(one.reward for one in scores)))
        return self.tried[version]

    def _weigh(self, candidate: Candidate) -> None:
        before = self.best.version if self.tried else None
        self.tried[candidate.version] = candidate
        if self.best.version != before:
            self._tell(self.best)

    async def lesson(self, score: Score) -> dict[str, str]:
        """Return what a reflecting model is shown of a rollout."""
        return lesson_of(await self._api.rollout(score.rollout_id))

    async def look_again(self) -> None:
        """Look again at versions that cannot be told from the best one, the least seen first, until budget is spent."""
        looks = dict.fromkeys(self.tried, 1)
        with suppress(BudgetSpent):
            while (version := self._unsure(looks)) is not None:
                await self.scores(version, self.split.validation, looks[version])
                looks[version] += 1
                mean = fmean(map(fmean, self._seen(version, looks[version])))
                self._weigh(self.tried[version]._replace(mean=mean))

    def _seen(self, version: int, looks: int) -> list[list[float]]:
        """The rewards of a version, for each validation task."""
        return [[one.reward for one in self._known[version, task.task_id][:looks]] for task in self.split.validation]

    def _unsure(self, looks: dict[int, int]) -> int | None:
        """The version to look at next; None if the best one is clear, or if looking again shows the same."""
        tasks = [task for version, n in looks.items() for task in self._seen(version, n)]
        again = [task for task in tasks if len(task) > 1]
        spread = fmean(map(pvariance, again)) if again else pvariance([one for task in tasks for one in task])
        size, best = len(self.split.validation), self.best

        def near(one: Candidate) -> bool:
            error = (spread / size * (1 / looks[one.version] + 1 / looks[best.version])) ** 0.5
            return best.mean - one.mean <= NEAR * error

        ranked = sorted(self.tried.values(), key=lambda one: (-one.mean, one.version))
        close = [one.version for one in ranked if near(one)][:AT_MOST]
        chosen = min(close, key=lambda version: looks[version])
        return None if len(close) == 1 or (spread == 0 and looks[chosen] > 1) else chosen


class Reflection:
    """`model` is litellm's name of it: `openai/gpt-5`, `anthropic/…`. Its key is where litellm looks for it.

    The n-th time that it gets the same text, it returns the n-th answer of the file, if there is one. With `most`
    answers in the file, `ask` raises BudgetSpent for another.
    """

    def __init__(self, model: str, base_url: str | None, file: Path, most: int) -> None:
        self._model, self._base_url, self._file, self._most = model, base_url, file, most
        self._uses: Counter[str] = Counter()
        self._answers: dict[str, Any] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            with suppress(ValueError):  # the last one may have been cut off
                kept = json.loads(line)
                self._answers[kept["key"]] = kept

    @property
    def used(self) -> Used:
        """Return the tokens of all answers, if they told."""
        total = Used()
        for kept in self._answers.values():
            total = total.plus(used(kept["usage"]) or Used())
        return total

    async def ask(self, text: str) -> str:
        """Return the model's answer; LightningError if it gives none, BudgetSpent if it may not be asked again."""
        digest = hashlib.sha256(f"{self._model}\n{text}".encode(errors="surrogatepass")).hexdigest()
        self._uses[digest] += 1
        key = f"{digest} {self._uses[digest]}"
        if key not in self._answers:
            if len(self._answers) >= self._most:
                raise BudgetSpent
            answer, usage = await self._complete(text)
            self._answers[key] = {"key": key, "answer": answer, "usage": usage}
            await asyncio.to_thread(self._keep, self._answers[key])
        return str(self._answers[key]["answer"])

    async def _complete(self, text: str) -> tuple[str, Any]:
        litellm = import_litellm()
        from openai import OpenAIError

        messages = [{"role": "user", "content": text}]
        try:
            answer = await litellm.acompletion(
                self._model, messages=messages, base_url=self._base_url, timeout=TIMEOUT_S, num_retries=3
            )
        except OpenAIError as error:  # what all of litellm's errors are
            raise LightningError(f"{self._model} does not answer: {error}") from None
        content = answer.choices[0].message.content
        if not isinstance(content, str) or not content.strip():
            raise LightningError(f"{self._model} answered nothing")
        usage = getattr(answer, "usage", None)
        return content, usage and usage.model_dump()

    def _keep(self, answer: Any) -> None:
        make_private(self._file)
        with self._file.open("a") as file:
            file.write(json.dumps(answer, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def lesson_of(rollout: Json) -> dict[str, str]:
    """Return what the agent was asked, what it and its tools did, and what came of it."""
    turns = [*chat_turns(rollout["calls"])]
    messages = max(turns, key=lambda turn: len(turn.messages)).messages if turns else []
    asked = [text(one) for turn in turns[:1] for one in turn.shown if one["role"] == "user"]
    parts = {
        "Inputs": asked[0] if asked else "(no call was made)",
        "Generated Outputs": "\n".join(line for one in messages for line in _done(one)) or "(nothing was said)",
        "Feedback": "\n".join(_feedback(rollout)),
    }
    return {
        name: part if len(part) <= MOST else f"{part[: MOST // 2]}\n…\n{part[-MOST // 2 :]}"
        for name, part in parts.items()
    }


def _done(message: Json) -> Iterator[str]:
    if message["role"] not in ("system", "developer", "user"):
        if said := text(dict(message)):
            yield f"{message['role']}: {said}"
        yield from (f"calls {one.name}({one.arguments})" for one in calls_in(message))


def _feedback(rollout: Json) -> Iterator[str]:
    """The reward, its comments, failed tools, failed calls, how the rollout ended."""
    yield f"reward: {rollout['reward']}"
    newest = {(reward.get("call_id"), reward["name"]): reward for reward in rollout["rewards"]}  # oldest first
    for reward in newest.values():
        if reward["comment"]:
            yield f"{reward['source'] or reward['name']} says: {reward['comment']}"
    for call in rollout["calls"]:
        if call["error"]:
            yield f"a call failed: {call['error']}"
        for tool in call["tool_calls"]:
            if tool["is_error"]:
                yield f"the tool {tool['name']} failed: {text({'content': tool['result']})}"
    if rollout["status"] == "failed":
        yield f"the agent failed: {rollout['reason']}"


BATCH = 4  # runs that a critic reads


@dataclass(frozen=True, slots=True)
class Sizes:
    """How wide and long the search is: prompts kept each round, new ones of each, rounds."""

    beam: int
    branch: int
    rounds: int


async def apo_search(job: Search, reflection: Reflection, own: str, sizes: Sizes) -> None:
    """Try prompts until the rounds are over or the budget is spent; all versions tried are in `job.tried`."""
    rng = random.Random(job.seed)

    async def edited(parent: Candidate) -> str:
        tasks = rng.sample(job.split.lessons, min(BATCH, len(job.split.lessons)))
        lessons = [await job.lesson(score) for score in await job.scores(parent.version, tasks)]
        runs = ("<run>\nasked: {Inputs}\n{Generated Outputs}\n{Feedback}\n</run>".format_map(one) for one in lessons)
        critique = await reflection.ask(CRITIC.format(prompt=parent.text, runs="\n\n".join(runs)))
        return between(await reflection.ask(EDITOR.format(prompt=parent.text, critique=critique))) or parent.text

    with suppress(BudgetSpent):
        beam = [await job.validate(await job.version_of(own), own)]
        for round_ in range(1, sizes.rounds + 1):
            for parent in list(beam):
                for _ in range(sizes.branch):
                    new = await edited(parent)
                    version = await job.version_of(new, parent.version, f"apo, round {round_}")
                    beam.append(await job.validate(version, new))
            beam = sorted(set(beam), key=lambda one: (-one.mean, one.version))[: sizes.beam]


def between(answer: str) -> str | None:
    """Return the text between the tags that the editor was to write; None without them."""
    found = re.search(r"<prompt>\s*(\S.*?)\s*</prompt>(?!.*</prompt>)", answer, re.DOTALL)
    return found[1] if found else None


async def gepa_search(job: Search, reflection: Reflection, own: str, sizes: Sizes) -> None:
    """Try prompts until the budget is spent; all versions tried are in `job.tried`. ConfigError without the package.

    The package runs in a thread.
    """
    try:
        import gepa
    except ImportError:
        raise ConfigError("--method gepa needs the package gepa: pip install 'lightning-proxy[optimize]'") from None
    adapter = _Adapter(job, reflection, asyncio.get_running_loop())
    try:
        await asyncio.to_thread(
            gepa.optimize,
            seed_candidate={job.prompt: own},
            trainset=list(job.split.lessons),
            valset=list(job.split.validation),
            adapter=adapter,
            reflection_lm=adapter.reflect,
            reflection_minibatch_size=BATCH,
            skip_perfect_score=False,
            max_metric_calls=job.budget,
            logger=SimpleNamespace(log=lambda _: None),  # the command shows how it goes
            seed=job.seed,
        )
    except _Ended as ended:
        if not isinstance(ended.__cause__, BudgetSpent):
            raise ended.__cause__ or ended from None
    finally:
        adapter.is_over = True


class _Ended(BaseException):
    """Ends the package, which ignores any other exception."""


class _Adapter:
    """Evaluates candidates for the package, whose thread it is called in."""

    propose_new_texts = None

    def __init__(self, job: Search, reflection: Reflection, loop: asyncio.AbstractEventLoop) -> None:
        self._job, self._reflection, self._loop, self.is_over = job, reflection, loop, False

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch

        scores = self._wait(self._scores(batch, candidate[self._job.prompt]))
        traces = [self._wait(self._job.lesson(score)) for score in scores] if capture_traces else None
        return EvaluationBatch(outputs=scores, scores=[score.reward for score in scores], trajectories=traces)

    async def _scores(self, batch: Sequence[Task], text: str) -> list[Score]:
        version = await self._job.version_of(text, comment="gepa")
        if [*batch] == self._job.split.validation:
            await self._job.validate(version, text)
        return await self._job.scores(version, batch)

    def make_reflective_dataset(self, candidate: Json, evaluated: Any, components: list[str]) -> Json:
        return dict.fromkeys(components, evaluated.trajectories)

    def reflect(self, prompt: Any) -> str:
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(one["content"]) for one in prompt)
        return self._wait(self._reflection.ask(text))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self.is_over:
            work.close()
            raise _Ended
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except Exception as error:
            self.is_over = True
            raise _Ended from error
