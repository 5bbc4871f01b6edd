"""Searches for a better prompt, by GEPA or APO, and judges the best one on held-out tasks.

`gepa`: reflective mutation, and a Pareto front over tasks (arXiv 2507.19457), by its authors' package.
`apo`: textual gradients (an editor rewrites as a critic says) and beam search (ProTeGi, arXiv 2305.03495).

A search always replays from its beginning. The store and the file of reflections supply what was done before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from rich.console import Console

from ...commands.api_client import ApiClient
from ...commands.run.command import programs, run_options
from ...commands.run.report import ProgressView
from ...commands.run.run import RunOptions, run_tasks
from ...commands.run.runner import Runner, runner_for
from ...commands.run.tasks import Task, read_tasks
from ...commands.system.processes import make_directory
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ...core.prices import Prices, Used, import_litellm, require_litellm, used
from ...core.statistics import compare
from ...core.tools import calls_in
from ...proxy.dialects.transcript import chat_turns, text
from ...store.sqlite.file import make_private

SEED = 0
HELD_OUT = 5  # one task in five is held out, where no file has them
VALIDATION = 16  # tasks to compare prompts on, if half of the tasks are that many
BATCH = 4  # runs that a critic reads
BEAM, BRANCH, ROUNDS = 4, 4, 3  # of apo: prompts kept for the next round, new prompts from each, rounds
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
Json = dict[str, Any]
T = TypeVar("T")


class BudgetSpent(Exception):
    """The search has used up its rollouts or its reflections."""


class Score(NamedTuple):
    rollout_id: str
    reward: float


class Candidate(NamedTuple):
    """A version of the prompt that was tried. `mean`: its mean reward over the validation tasks."""

    version: int
    text: str
    mean: float


async def optimized(
    config: Config, command: list[str], *, method: str, prompt: str, tasks: Path, held_out: Path | None, reflect: str,
    reflect_url: str | None, budget: int, concurrency: int, promote: bool,
) -> dict[str, Any]:  # fmt: skip
    """Search and return the results: `mean_…` are rewards of validation tasks, `before`, `after` of held-out ones."""
    require_litellm(f"--reflect {reflect}")
    lessons, validation, unseen = split(tasks, held_out)
    view = ProgressView(Console(stderr=True))
    directory = make_directory(config.policy.directory / "optimize", "policy.directory")
    runner, api = runner_for(config, command, [], view.say), ApiClient.of(config, patience_s=60)
    async with programs(api, runner, view):
        own = (await api.request("GET", f"/prompts/{quote(prompt, safe='')}"))["text"]
        # The same request has the same name, and so resumes.
        request = [method, prompt, own, command, reflect, [task.line for task in (*validation, *lessons)]]
        run = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:12]
        reflection = Reflection(reflect, reflect_url, directory / f"{run}.jsonl", budget)
        options = run_options(config, 1, concurrency, "eval", None)
        failed_reward = config.trainer.failed_reward or 0.0
        job = Search(api, runner, options, view, prompt, run, budget, lessons, validation, failed_reward)
        await job.open()
        await (apo_search if method == "apo" else gepa_search)(job, reflection, own)
        if not job.tried:
            raise ConfigError(f"--budget {budget} is too small: the validation tasks take {len(validation)} rollouts")
        first, best = next(iter(job.tried.values())), job.best
        before, after = [
            [score.reward for score in await job.scores(one.version, unseen, held_out=True)] for one in (first, best)
        ]
        metrics = {"method": method, "run": run, "validation": best.mean, "held_out": fmean(after)}
        await job.version_of(best.text, metrics=metrics, promote=promote)
    spent, price = reflection.used, Prices(config.prices).of(reflect)
    return {
        "prompt": prompt, "run": run, "version": best.version, "rollouts": job.taken, "tried": len(job.tried),
        "mean_before": first.mean, "mean_after": best.mean, "before": fmean(before), "after": fmean(after),
        "held_out": None if best is first else asdict(compare(after, before, SEED)),
        "reflect_tokens": spent.input + spent.output, "reflect_usd": None if price is None else price.of(spent),
    }  # fmt: skip


def split(file: Path, held_out: Path | None) -> tuple[list[Task], list[Task], list[Task]]:
    """Return tasks to learn from, to validate on, and to hold out. Raises ConfigError if there are too few."""
    tasks = read_tasks(file)
    random.Random(SEED).shuffle(tasks)
    size = 0 if held_out else len(tasks) // HELD_OUT
    unseen, tasks = read_tasks(held_out) if held_out else tasks[:size], tasks[size:]
    size = min(VALIDATION, len(tasks) // 2)
    if not size or not unseen:
        raise ConfigError(f"{file} has too few tasks for training, validation and (without --held-out) held-out sets")
    return tasks[size:], tasks[:size], unseen


def summary(found: dict[str, Any], *, promoted: bool) -> str:
    usd = "" if found["reflect_usd"] is None else " ({reflect_usd:.4g} USD)"
    lines = [
        "{tried} versions of {prompt} tried in {rollouts} rollouts (run {run})",
        "validation tasks: {mean_before:.3f} before, {mean_after:.3f} with version {version}",
        "the reflecting model used {reflect_tokens:,} tokens" + usd,
    ]
    promote = "make it live: lightning-proxy prompts promote {prompt} {version}"
    if found["held_out"] is None:
        lines.append("no version was better than the first one")
    else:
        lines += [
            "held-out tasks: {before:.3f} before, {after:.3f} after: {held_out[difference]:+.3f} "
            "[{held_out[interval][low]:+.3f}, {held_out[interval][high]:+.3f}] over {held_out[tasks]} tasks, "
            "p {held_out[p]:.2g}",
            "version {version} is live" if promoted else promote,
        ]
    return "\n".join(lines).format_map(found)


class Search:
    """Tries versions of a prompt, each at most once per task. The store keeps the rollouts under the name `run`."""

    def __init__(
        self, api: ApiClient, runner: Runner, options: RunOptions, view: ProgressView, prompt: str, run: str,
        budget: int, lessons: list[Task], validation: list[Task], failed_reward: float,
    ) -> None:  # fmt: skip
        self.prompt, self.budget, self.lessons, self.validation = prompt, budget, lessons, validation
        self._api, self._runner, self._options, self._view = api, runner, options, view
        self._run, self._failed_reward, self._bar = run, failed_reward, view.bar("search", budget)
        self._known: dict[tuple[int, str], Score] = {}  # by version and task
        self.tried: dict[int, Candidate] = {}
        self.taken = 0  # rollouts of the search

    async def open(self) -> None:
        """Read what earlier starts of the run tried, and end rollouts that they left running."""
        route = f"/prompts/{quote(self.prompt, safe='')}/rollouts"
        for one in (await self._api.request("GET", route, params={"run": self._run}))["data"]:
            if one["status"] == "running":
                await self._api.end_rollout(one["rollout_id"], "discarded", "the optimisation was stopped")
            elif one["status"] != "discarded":
                self.taken += not one["held_out"]
                failed = one["status"] == "failed"
                if failed or one["reward"] is not None:  # another one takes the place of one without a reward
                    self._add(one["version"], one["task_id"], one["rollout_id"], one["reward"], failed)
        if self.taken:
            self._view.say(f"run {self._run} resumes: {self.taken} of {self.budget} rollouts are done")

    @property
    def best(self) -> Candidate:
        """Return the best candidate so far; of equals, the oldest version."""
        return max(self.tried.values(), key=lambda one: (one.mean, -one.version))

    async def version_of(self, text: str, **more: Any) -> int:
        """Return the version with this text, adding it if needed."""
        body = {"name": self.prompt, "text": text, **more}
        return int((await self._api.request("POST", "/prompts", body))["version"])

    async def scores(self, version: int, tasks: Sequence[Task], *, held_out: bool = False) -> list[Score]:
        """Return the tasks' scores, in order, and run tasks without one. Raises BudgetSpent if the budget is too small.

        Held-out tasks do not count towards the budget.
        """
        # By name: gepa pads a batch to its size with a task that it has already.
        missing = {task.task_id: task for task in tasks if (version, task.task_id) not in self._known}
        if not held_out and len(missing) > max(self.budget - self.taken, 0):
            raise BudgetSpent

        def show(_: object) -> None:
            self._bar.show(self.taken, self.best.mean if self.tried else None, 0)

        choice = {"prompts": {self.prompt: version}, "metadata": {"optimize": self._run, "held_out": held_out}}
        options = replace(self._options, choice=choice)
        for one in await run_tasks(self._api, missing.values(), self._runner, options, show):
            self.taken += not held_out
            self._add(version, one.task_id, one.rollout_id, one.reward, one.failed)
        return [self._known[version, task.task_id] for task in tasks]

    def _add(self, version: int, task_id: str, rollout_id: str, reward: float | None, failed: bool) -> None:
        if reward is None and not failed:
            raise LightningError(f"rollout {rollout_id} has no reward: the agent must post one before the rollout ends")
        self._known[version, task_id] = Score(rollout_id, self._failed_reward if reward is None else reward)

    async def validate(self, version: int, text: str) -> Candidate:
        """Return the version with its mean reward over the validation tasks. Raises what `scores` raises."""
        if version not in self.tried:
            mean = fmean(score.reward for score in await self.scores(version, self.validation))
            candidate = self.tried[version] = Candidate(version, text, mean)
            if self.best is candidate:
                self._view.say(f"version {version}: {mean:.3f} on {len(self.validation)} tasks")
        return self.tried[version]

    async def lesson(self, score: Score) -> dict[str, str]:
        return lesson_of(await self._api.rollout(score.rollout_id))


class Reflection:
    """A reflecting model. A file keeps its answers, at most `most`, which are reused when a search resumes."""

    def __init__(self, model: str, base_url: str | None, file: Path, most: int) -> None:
        self._model, self._base_url, self._file, self._most = model, base_url, file, most
        self._uses: Counter[str] = Counter()
        self._answers: dict[str, Any] = {}
        make_private(file)
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # the last one may have been cut off
                kept = json.loads(line)
                self._answers[kept["key"]] = kept

    @property
    def used(self) -> Used:
        """Return the tokens of all answers, as far as the model reports them."""
        return reduce(Used.plus, (used(kept["usage"]) or Used() for kept in self._answers.values()), Used())

    async def ask(self, text: str) -> str:
        """Return the model's answer. Raises LightningError if it gives none, BudgetSpent after `most` answers."""
        digest = hashlib.sha256(f"{self._model}\n{text}".encode(errors="surrogatepass")).hexdigest()
        self._uses[digest] += 1
        key = f"{digest} {self._uses[digest]}"
        if key not in self._answers:
            if len(self._answers) >= self._most:
                raise BudgetSpent
            kept = {"key": key, **await self._complete(text)}
            with self._file.open("a") as file:
                file.write(json.dumps(kept, default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._answers[key] = kept
        return str(self._answers[key]["answer"])

    async def _complete(self, text: str) -> dict[str, Any]:
        litellm = import_litellm()
        from openai import OpenAIError

        messages = [{"role": "user", "content": text}]
        try:
            answer = await litellm.acompletion(
                self._model, messages=messages, base_url=self._base_url, timeout=TIMEOUT_S, num_retries=3
            )
        except OpenAIError as error:  # what all of litellm's errors are
            raise LightningError(f"{self._model} did not answer: {error}") from None
        content = answer.choices[0].message.content
        if not isinstance(content, str) or not content.strip():
            raise LightningError(f"{self._model} returned an empty answer")
        usage = getattr(answer, "usage", None)
        return {"answer": content, "usage": usage and usage.model_dump()}


def lesson_of(rollout: Json) -> dict[str, str]:
    """Return what the agent was asked, what it and its tools did, and the outcome."""
    messages = max((turn.messages for turn in chat_turns(rollout["calls"])), key=len, default=[])
    done = list[str]()
    for message in messages:
        if message["role"] not in ("system", "developer", "user"):
            done += [f"{message['role']}: {text(message)}"] if text(message) else []
            done += [f"calls {one.name}({one.arguments})" for one in calls_in(message)]
    parts = {
        "Inputs": next((text(one) for one in messages if one["role"] == "user"), "(no call was made)"),
        "Generated Outputs": "\n".join(done) or "(nothing was said)",
        "Feedback": "\n".join(_feedback(rollout)),
    }
    return {
        name: part if len(part) <= MOST else f"{part[: MOST // 2]}\n…\n{part[-MOST // 2 :]}"
        for name, part in parts.items()
    }


def _feedback(rollout: Json) -> Iterator[str]:
    """Feedback on a rollout: reward, comments, failed tools and calls, and how it ended."""
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


async def apo_search(job: Search, reflection: Reflection, own: str) -> None:
    """Try prompts until the rounds are over or the budget is spent. Validated versions are added to `job.tried`."""
    rng = random.Random(SEED)

    async def edited(parent: Candidate) -> str:
        tasks = rng.sample(job.lessons, min(BATCH, len(job.lessons)))
        lessons = [await job.lesson(score) for score in await job.scores(parent.version, tasks)]
        runs = ("<run>\nasked: {Inputs}\n{Generated Outputs}\n{Feedback}\n</run>".format_map(one) for one in lessons)
        critique = await reflection.ask(CRITIC.format(prompt=parent.text, runs="\n\n".join(runs)))
        return between(await reflection.ask(EDITOR.format(prompt=parent.text, critique=critique))) or parent.text

    with suppress(BudgetSpent):
        beam = [await job.validate(await job.version_of(own), own)]
        for round_ in range(1, ROUNDS + 1):
            for parent in list(beam):
                for _ in range(BRANCH):
                    new = await edited(parent)
                    version = await job.version_of(new, parent=parent.version, comment=f"apo, round {round_}")
                    beam.append(await job.validate(version, new))
            beam = sorted(set(beam), key=lambda one: (-one.mean, one.version))[:BEAM]


def between(answer: str) -> str | None:
    """Return the text between the tags that the editor should write; None if they are missing."""
    found = re.search(r"<prompt>\s*(\S.*?)\s*</prompt>(?!.*</prompt>)", answer, re.DOTALL)
    return found[1] if found else None


async def gepa_search(job: Search, reflection: Reflection, own: str) -> None:
    """Try prompts until the budget is spent. Validated versions are added to `job.tried`."""
    try:
        import gepa
    except ImportError:
        raise ConfigError("--method gepa needs the package gepa: pip install 'lightning-proxy[optimize]'") from None
    adapter = _Adapter(job, reflection, asyncio.get_running_loop())
    try:
        await asyncio.to_thread(
            gepa.optimize, seed_candidate={job.prompt: own}, trainset=job.lessons, valset=job.validation, seed=SEED,
            adapter=adapter, reflection_lm=adapter.reflect, reflection_minibatch_size=BATCH, skip_perfect_score=False,
            max_metric_calls=job.budget, logger=SimpleNamespace(log=lambda _: None),  # the command shows how it goes
        )  # fmt: skip
    except _Ended as ended:
        if not isinstance(ended.__cause__, BudgetSpent):
            raise ended.__cause__ or ended from None
    finally:
        adapter.is_over = True


class _Ended(BaseException):
    """Stops the package gepa, which ignores ordinary exceptions."""


class _Adapter:
    """Evaluates candidates for the package gepa, in its thread."""

    propose_new_texts = None

    def __init__(self, job: Search, reflection: Reflection, loop: asyncio.AbstractEventLoop) -> None:
        self._job, self._reflection, self._loop, self.is_over = job, reflection, loop, False

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch

        text = candidate[self._job.prompt]
        version = self._wait(self._job.version_of(text, comment="gepa"))
        if batch == self._job.validation:
            self._wait(self._job.validate(version, text))
        scores = self._wait(self._job.scores(version, batch))
        traces = [self._wait(self._job.lesson(score)) for score in scores] if capture_traces else None
        return EvaluationBatch(outputs=scores, scores=[score.reward for score in scores], trajectories=traces)

    def make_reflective_dataset(self, candidate: Json, evaluated: Any, components: list[str]) -> Json:
        return dict.fromkeys(components, evaluated.trajectories)

    def reflect(self, prompt: str) -> str:
        return self._wait(self._reflection.ask(prompt))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self.is_over:
            work.close()
            raise _Ended
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except Exception as error:
            self.is_over = True
            raise _Ended from error
