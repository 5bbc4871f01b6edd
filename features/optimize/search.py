"""Searches for a better prompt, by GEPA or APO: tasks, scores and reflections in, the best prompt out.

One look at each validation task is little: of true rates 0.20 and 0.85, both may be right on 3 of 6 tasks. So `settle`
looks again at the best versions as long as they cannot be told apart and budget is left.

`gepa`: reflective mutation, and a Pareto front over tasks (arXiv 2507.19457), by its authors' package.
`apo`: textual gradients and beam search (ProTeGi, arXiv 2305.03495). A critic reads a few rollouts and says what is
wrong with the prompt, the textual gradient. An editor rewrites the prompt. The best prompts enter the next round.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, TypeVar

from ...commands.api_client import ApiClient
from ...commands.run.run import RolloutResult, RunOptions, run_tasks
from ...commands.run.runner import Runner
from ...commands.run.tasks import Task
from ...core.errors import ConfigError, LightningError
from ...core.prices import Used, import_litellm, used
from ...proxy.dialects.transcript import chat_turns
from ...store.sqlite.file import make_private

NEAR = 2.0  # standard errors, within which one mean is not better than another
AT_MOST = 4  # versions that are looked at again
TIMEOUT_S = 300.0
Answered = tuple[str, Any]  # an answer, and its usage
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
T = TypeVar("T")
MOST_IDLE = 20  # iterations in a row that try nothing new


@dataclass(slots=True)
class Search:
    """A search under way. `lessons`: tasks to learn from; `validation`: those that candidates are compared on.

    `tell` is called with each candidate that is better than all before.
    """

    prompt: str
    text: str
    scores: PromptScores
    reflection: Reflection
    lessons: Sequence[Task]
    validation: Sequence[Task]
    seed: int
    tell: Callable[[Candidate], None]
    tried: dict[int, Candidate] = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        """Return the best candidate so far; of equals, the first."""
        return max(self.tried.values(), key=lambda one: (one.mean, -one.version))

    async def validate(self, version: int, text: str) -> Candidate:
        """Return the version with its mean reward over the validation tasks. Raise BudgetSpent."""
        if version not in self.tried:
            tried = Candidate(version, text, mean(await self.scores.of(version, self.validation)))
            is_best = not self.tried or tried.mean > self.best.mean
            self.tried[version] = tried
            if is_best:
                self.tell(tried)
        return self.tried[version]

    async def settle(self) -> None:
        """Look again at versions that cannot be told from the best one, the least seen first, until budget is spent."""
        looks = dict.fromkeys(self.tried, 1)
        for one in looks:
            self._weigh(one, 1)
        try:
            while (version := self._unsure(looks)) is not None:
                await self.scores.look(version, self.validation, looks[version])
                looks[version] += 1
                self._weigh(version, looks[version])
        except BudgetSpent:
            return

    def _seen(self, version: int, looks: int) -> list[list[float]]:
        """The rewards of a version, for each validation task."""
        return [self.scores.seen(version, task, looks) for task in self.validation]

    def _weigh(self, version: int, looks: int) -> None:
        best = self.best
        self.tried[version] = replace(self.tried[version], mean=fmean(map(fmean, self._seen(version, looks))))
        if self.best.version != best.version:
            self.tell(self.best)

    def _unsure(self, looks: dict[int, int]) -> int | None:
        """The version to look at next; None if the best one is clear, or if looking again shows the same."""
        seen = {version: self._seen(version, n) for version, n in looks.items()}
        rewards = {version: [one for task in of for one in task] for version, of in seen.items()}
        again = [task for of in seen.values() for task in of if len(task) > 1]
        spread = fmean(map(pvariance, again)) if again else pvariance([one for of in rewards.values() for one in of])

        def near(one: Candidate) -> bool:
            error = (spread / len(rewards[one.version]) + spread / len(rewards[self.best.version])) ** 0.5
            return self.best.mean - one.mean <= NEAR * error

        ranked = sorted(self.tried.values(), key=lambda one: (-one.mean, one.version))
        close = [one for one in ranked if near(one)][:AT_MOST]
        chosen = min(close, key=lambda one: len(rewards[one.version]))
        settled = len(close) == 1 or (spread == 0 and len(rewards[chosen.version]) > len(self.validation))
        return None if settled else chosen.version


class BudgetSpent(Exception):
    """The rollouts that the search may take are used up."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one rollout of a task."""

    task_id: str
    rollout_id: str
    reward: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version of the prompt that was tried. `mean`: over the tasks that candidates are compared on."""

    version: int
    text: str
    mean: float


class PromptScores:
    """Tries versions of a prompt. Rollouts are kept in the store under the run's name, so that a run can be resumed.

    A version that was tried on a task in this run is not tried on it again, but by another look. What the store has
    of other runs counts where versions are compared.
    """

    def __init__(
        self, api: ApiClient, runner: Runner, options: RunOptions, *, prompt: str, run: str, budget: int,
        failed_reward: float, on_result: Callable[[RolloutResult], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`budget`: rollouts that `of` may take, those of an earlier start included."""
        self._api, self._runner, self._options = api, runner, options
        self._prompt, self._run, self._budget = prompt, run, budget
        self._failed_reward, self._on_result = failed_reward, on_result
        self._known: dict[tuple[int, str], list[Score]] = {}  # one for each look
        self._elsewhere: dict[tuple[int, str], list[float]] = {}  # what other runs saw
        self._requested: set[tuple[int, str]] = set()
        self.taken = 0  # rollouts of the search

    async def open(self) -> None:
        """Read what earlier starts of the run have tried; end the rollouts that they left running."""
        route = f"/prompts/{self._prompt}/rollouts"
        tried = await self._api.request("GET", route, params={"run": self._run})
        own = {one["rollout_id"] for one in tried["data"]}
        for one in (await self._api.request("GET", route))["data"]:
            if one["rollout_id"] not in own and one["reward"] is not None:
                self._elsewhere.setdefault((one["version"], one["task_id"]), []).append(one["reward"])
        for one in tried["data"]:
            if one["status"] == "running":
                await self._api.end_rollout(one["rollout_id"], "discarded", "the optimisation was stopped")
            elif one["status"] != "discarded":
                self.taken += not one["held_out"]
                failed = one["status"] == "failed"
                if failed or one["reward"] is not None:  # another one takes the place of one without a reward
                    self._add(one["version"], one["task_id"], one["rollout_id"], one["reward"], failed)

    @property
    def left(self) -> int:
        """Return how many rollouts the search may still take."""
        return max(self._budget - self.taken, 0)

    @property
    def requested(self) -> int:
        """Return how many scores were requested since the start, each counted once."""
        return len(self._requested)

    async def version_of(self, text: str, parent: int | None = None, comment: str | None = None) -> int:
        """Return the version with this text; it is added if there is none."""
        body = {"name": self._prompt, "text": text, "parent": parent, "comment": comment}
        answer = await self._api.request("POST", "/prompts", body)
        return int(answer["version"])

    async def of(self, version: int, tasks: Sequence[Task], *, held_out: bool = False) -> list[Score]:
        """Return the version's rewards on the tasks, in their order. Raise BudgetSpent before it runs any.

        `held_out`: it is no part of the search, and not of its budget.
        """
        self._requested |= {(version, task.task_id) for task in tasks}
        return await self.look(version, tasks, 0, held_out=held_out)

    async def look(self, version: int, tasks: Sequence[Task], look: int, *, held_out: bool = False) -> list[Score]:
        """Return the version's rewards on the tasks at its `look`th look, the first being 0."""
        missing = [task for task in tasks if len(self._known.get((version, task.task_id), ())) <= look]
        if missing and not held_out and len(missing) > self.left:
            raise BudgetSpent
        choice = {"prompts": {self._prompt: version}, "metadata": {"optimize": self._run, "held_out": held_out}}
        results = await run_tasks(
            self._api, missing, self._runner, replace(self._options, choice=choice), self._on_result
        )
        self.taken += 0 if held_out else len(results)
        for result in results:
            self._add(version, result.task_id, result.rollout_id, result.reward, result.failed)
        return [self._known[version, task.task_id][look] for task in tasks]

    def seen(self, version: int, task: Task, looks: int) -> list[float]:
        """Return the rewards of the first looks, and those of other runs."""
        known = self._known.get((version, task.task_id), [])[:looks]
        return [score.reward for score in known] + self._elsewhere.get((version, task.task_id), [])

    async def lesson(self, score: Score) -> Mapping[str, Any]:
        """Return the full record of a rollout."""
        return await self._api.rollout(score.rollout_id)

    def _add(self, version: int, task_id: str, rollout_id: str, reward: float | None, failed: bool) -> None:
        if reward is None and not failed:
            raise LightningError(f"rollout {rollout_id} has no reward: the agent posts one to /reward before it ends")
        value = self._failed_reward if reward is None else reward
        self._known.setdefault((version, task_id), []).append(Score(task_id, rollout_id, value))


def mean(scores: Sequence[Score]) -> float:
    return fmean(score.reward for score in scores)


class Reflection:
    """`model` is litellm's name of it: `openai/gpt-5`, `anthropic/…`. Its key is where litellm looks for it.

    The n-th time that it gets the same text, it returns the n-th answer of the file, if there is one. After `most`
    answers, those of the file included, `ask` raises BudgetSpent. `used`: the tokens of all its answers so far, if they
    told.
    """

    def __init__(self, model: str, base_url: str | None, file: Path, most: int | None = None) -> None:
        self._model, self._base_url, self._file, self._most = model, base_url, file, most
        self._uses: Counter[str] = Counter()
        self._answers = _read(file)
        self.used = Used()

    async def ask(self, text: str) -> str:
        """Return the model's answer; LightningError if it gives none, BudgetSpent if it may not be asked again."""
        if self._most is not None and self._uses.total() >= self._most:
            raise BudgetSpent
        digest = hashlib.sha256(f"{self._model}\n{text}".encode(errors="surrogatepass")).hexdigest()
        key = f"{digest} {self._uses[digest] + 1}"
        if key not in self._answers:
            self._answers[key] = await self._complete(text)
            await asyncio.to_thread(self._keep, key)
        self._uses[digest] += 1
        answer, usage = self._answers[key]
        self.used = self.used.plus(used(usage) or Used())
        return answer

    async def _complete(self, text: str) -> Answered:
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

    def _keep(self, key: str) -> None:
        answer, usage = self._answers[key]
        make_private(self._file)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": key, "answer": answer, "usage": usage}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(file: Path) -> dict[str, Answered]:
    """The answers in a file. Its last line may have been cut off."""
    answers: dict[str, Answered] = {}
    if file.exists():
        for line in file.read_text().split("\n"):
            try:
                kept = json.loads(line)
            except ValueError:
                continue
            answers[kept["key"]] = kept["answer"], kept.get("usage")
    return answers


def inputs(rollout: Mapping[str, Any]) -> str:
    """Return the agent's task: the first message that is no system prompt."""
    for turn in [*chat_turns(rollout["calls"])][:1]:
        for message in turn.shown:
            if message["role"] == "user":
                return _cut(_text(message["content"]))
    return "(no call was made)"


def outputs(rollout: Mapping[str, Any]) -> str:
    """Return the answers of the agent's models, and the results of its tools, in order."""
    turns = [*chat_turns(rollout["calls"])]
    if not turns:
        return "(no call was made)"
    longest = max(turns, key=lambda turn: len(turn.messages))
    lines = [line for message in longest.messages for line in _lines(message)]
    return _cut("\n".join(lines) or "(nothing was said)")


def feedback(rollout: Mapping[str, Any]) -> str:
    """Return the outcome: the reward, its comments, failed tools, failed calls, how the rollout ended."""
    return _cut("\n".join(_feedback(rollout)))


def _feedback(rollout: Mapping[str, Any]) -> Iterator[str]:
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
                yield f"the tool {tool['name']} failed: {_text(tool['result'])}"
    if rollout["status"] == "failed":
        yield f"the agent failed: {rollout['reason']}"


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    if message["role"] in ("system", "developer", "user"):
        return
    if text := _text(message.get("content")):
        yield f"{message['role']}: {text}"
    for tool in message.get("tool_calls") or ():
        yield f"calls {tool['function']['name']}({_text(tool['function']['arguments'])})"


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(str(part.get("text", f"({part.get('type')})")) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST // 2]}\n…\n{text[-MOST // 2 :]}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How wide and long the search is: prompts kept each round, new ones of each, runs that a critic reads, rounds."""

    beam: int = 4
    branch: int = 4
    gradient_batch: int = 4
    rounds: int = 3


async def apo_search(job: Search, sizes: Sizes) -> None:
    """Try prompts until the rounds are over or the budget is spent; all versions tried are in `job.tried`."""
    rng = random.Random(job.seed)
    try:
        version = await job.scores.version_of(job.text)
        beam = [await job.validate(version, job.text)]
        for round_ in range(1, sizes.rounds + 1):
            for parent in list(beam):
                for _ in range(sizes.branch):
                    batch = rng.sample(job.lessons, min(sizes.gradient_batch, len(job.lessons)))
                    text = await _edited(job, parent, batch)
                    version = await job.scores.version_of(text, parent.version, f"apo, round {round_}")
                    beam.append(await job.validate(version, text))
            distinct = {one.version: one for one in beam}.values()
            beam = sorted(distinct, key=lambda one: (-one.mean, one.version))[: sizes.beam]
    except BudgetSpent:
        return


async def _edited(job: Search, parent: Candidate, tasks: Sequence[Task]) -> str:
    scores = await job.scores.of(parent.version, tasks)
    runs = "\n\n".join([await _run(job, score) for score in scores])
    critique = await job.reflection.ask(CRITIC.format(prompt=parent.text, runs=runs))
    answer = await job.reflection.ask(EDITOR.format(prompt=parent.text, critique=critique))
    return between(answer) or parent.text


async def _run(job: Search, score: Score) -> str:
    rollout = await job.scores.lesson(score)
    return f"<run>\nasked: {inputs(rollout)}\n{outputs(rollout)}\n{feedback(rollout)}\n</run>"


def between(answer: str) -> str | None:
    """Return the text between the tags that the editor was to write; None without them."""
    _, opened, rest = answer.partition("<prompt>")
    text, closed, _ = rest.rpartition("</prompt>")
    return text.strip() or None if opened and closed else None


async def gepa_search(job: Search, minibatch: int) -> None:
    """Try prompts until the budget is spent; all versions tried are in `job.tried`. ConfigError without the package.

    The package runs in a thread, always from its beginning. With the run's seed, its store and its file of reflections,
    it repeats the steps of an earlier start at no cost, and continues from there.
    """
    try:
        import gepa
    except ImportError:
        raise ConfigError("--method gepa needs the package gepa: pip install 'lightning-proxy[optimize]'") from None
    adapter = _Adapter(job, asyncio.get_running_loop())
    try:
        await asyncio.to_thread(
            gepa.optimize,
            seed_candidate={job.prompt: job.text},
            trainset=list(job.lessons),
            valset=list(job.validation),
            adapter=adapter,
            reflection_lm=adapter.reflect,
            reflection_minibatch_size=minibatch,
            skip_perfect_score=False,
            stop_callbacks=adapter.is_done,
            logger=_Quiet(),
            seed=job.seed,
        )
    except _Ended:
        if adapter.fault is not None and not isinstance(adapter.fault, BudgetSpent):
            raise adapter.fault from None
    finally:
        adapter.is_over = True


class _Ended(BaseException):
    """Ends the package, which ignores any other exception."""


class _Adapter:
    """Evaluates candidates for the package, whose thread it is called in."""

    propose_new_texts = None

    def __init__(self, job: Search, loop: asyncio.AbstractEventLoop) -> None:
        self._job, self._loop = job, loop
        self._idle, self._requested = 0, -1
        self.is_over = False
        self.fault: Exception | None = None

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch

        scores = self._wait(_scores(self._job, batch, candidate[self._job.prompt]))
        traces = [self._wait(self._job.scores.lesson(score)) for score in scores] if capture_traces else None
        rewards = [score.reward for score in scores]
        return EvaluationBatch(outputs=scores, scores=rewards, trajectories=traces)

    def make_reflective_dataset(
        self, candidate: dict[str, str], evaluated: Any, components: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        lessons = [
            {"Inputs": inputs(one), "Generated Outputs": outputs(one), "Feedback": feedback(one)}
            for one in evaluated.trajectories
        ]
        return dict.fromkeys(components, lessons)

    def reflect(self, prompt: Any) -> str:
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(one["content"]) for one in prompt)
        return self._wait(self._job.reflection.ask(text))

    def is_done(self, _: Any) -> bool:
        self._idle = self._idle + 1 if self._job.scores.requested == self._requested else 0
        self._requested = self._job.scores.requested
        return self._idle > MOST_IDLE

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self.is_over:
            work.close()
            raise _Ended
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except Exception as error:
            self.is_over, self.fault = True, error
            raise _Ended from error


async def _scores(job: Search, batch: Sequence[Task], text: str) -> list[Score]:
    version = await job.scores.version_of(text, comment="gepa")
    if list(batch) == list(job.validation):
        await job.validate(version, text)
    return await job.scores.of(version, batch)


class _Quiet:
    def log(self, message: str) -> None:
        """Say nothing: the command shows how it goes."""
