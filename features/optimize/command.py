"""The `optimize` command: searches for a better prompt, and says by held-out tasks whether it is one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from urllib.parse import quote

from rich.console import Console

from ...commands.api_client import ApiClient
from ...commands.eval.stats import Comparison, compare
from ...commands.formats import print_json
from ...commands.run.command import run_options
from ...commands.run.report import Bar, ProgressView
from ...commands.run.run import RunOptions
from ...commands.run.runner import Runner, runner_for
from ...commands.run.tasks import Task, read_tasks
from ...commands.signals import run_until_signal
from ...commands.system.processes import make_directory
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.prices import Prices, require_litellm
from .search import Candidate, PromptScores, Reflection, Search, Sizes, apo_search, gepa_search

HELD_OUT = 5  # one task in so many, where no file has them


@dataclass(frozen=True, slots=True)
class OptimizeRequest:
    """The options of the command line.

    `budget`: rollouts of the search, and calls of the reflecting model at most; the held-out ones come on top.
    """

    method: Literal["gepa", "apo"]
    prompt: str
    tasks: Path
    held_out: Path | None
    command: list[str]
    preload: list[str]
    reflect: str
    reflect_url: str | None
    budget: int
    validation: int
    batch: int
    sizes: Sizes
    seed: int
    concurrency: int
    promote: bool
    logs: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome. `mean`s are over the validation tasks; `held_out`: how far the best is above the first there.

    `reflect_tokens`, `reflect_usd`: of the reflecting model; None without a price.
    """

    prompt: str
    run: str
    version: int
    rollouts: int
    tried: int
    mean_before: float
    mean_after: float
    before: float
    after: float
    held_out: Comparison | None
    reflect_tokens: int
    reflect_usd: float | None


def optimize(config: Config, request: OptimizeRequest) -> None:
    """Run the command. Raise LightningError if it fails; what was tried until then is kept."""
    require_litellm(f"--reflect {request.reflect}")
    split = _split(request)
    console = Console(stderr=True)
    view = ProgressView(console)
    runner = runner_for(config, request.command, request.preload, view.say)
    options = run_options(config, 1, request.concurrency, "eval", request.logs)
    directory = make_directory(config.policy.directory / "optimize", "policy.directory")
    work = _Optimization(config, request, split, runner, options, directory, view)
    found = run_until_signal(work.run())
    if request.as_json:
        print_json(asdict(found))
    else:
        console.print(summary(found, promoted=request.promote), markup=False, highlight=False)


@dataclass(frozen=True, slots=True)
class Split:
    """Tasks to learn from, tasks to compare candidates on, and tasks that the search never sees."""

    lessons: list[Task]
    validation: list[Task]
    held_out: list[Task]


def _split(request: OptimizeRequest) -> Split:
    tasks = read_tasks(request.tasks)
    random.Random(request.seed).shuffle(tasks)
    if request.held_out is not None:
        held_out = read_tasks(request.held_out)
    else:
        size = len(tasks) // HELD_OUT
        held_out, tasks = tasks[:size], tasks[size:]
    size = min(request.validation, len(tasks) // 2)
    if not size or not held_out:
        raise ConfigError(
            f"{request.tasks} has too few tasks: some to learn from, some to compare prompts on, and some held out"
        )
    return Split(tasks[size:], tasks[:size], held_out)


@dataclass(frozen=True, slots=True)
class _Optimization:
    config: Config
    request: OptimizeRequest
    split: Split
    runner: Runner
    options: RunOptions
    directory: Path
    view: ProgressView

    async def run(self) -> Found:
        request = self.request
        async with ApiClient.of(self.config, patience_s=60) as api:
            prompt = await api.request("GET", f"/prompts/{quote(request.prompt, safe='')}")
            run = run_name(request, self.split, prompt["text"])
            with self.view:
                bar = self.view.bar("search", request.budget)
                scores = PromptScores(
                    api, self.runner, self.options, prompt=request.prompt, run=run, budget=request.budget,
                    failed_reward=self.config.trainer.failed_reward or 0.0,
                    on_result=lambda _: _show(bar, scores, job),
                )  # fmt: skip
                job = self._search(scores, run, prompt["text"])
                try:
                    await scores.open()
                    if scores.taken:
                        self.view.say(f"run {run} resumes: {scores.taken} of {request.budget} rollouts are done")
                    if request.method == "apo":
                        await apo_search(job, request.sizes)
                    else:
                        await gepa_search(job, request.batch)
                    if job.tried:
                        await job.settle()
                    return await self._judge(api, job, run)
                finally:
                    await asyncio.shield(self.runner.close())

    def _search(self, scores: PromptScores, run: str, text: str) -> Search:
        request = self.request
        file = self.directory / f"{run}.jsonl"
        reflection = Reflection(request.reflect, request.reflect_url, file, most=request.budget)

        def tell(best: Candidate) -> None:
            self.view.say(f"version {best.version}: {best.mean:.3f} on {len(self.split.validation)} tasks")

        split = self.split
        return Search(request.prompt, text, scores, reflection, split.lessons, split.validation, request.seed, tell)

    async def _judge(self, api: ApiClient, job: Search, run: str) -> Found:
        """Compare the best version with the first one on the held-out tasks, and store the result with it."""
        if not job.tried:
            raise ConfigError(f"--budget {self.request.budget} is less than one look at the validation tasks")
        first, best = next(iter(job.tried.values())), job.best
        before, after = [await self._held_out(job.scores, one) for one in (first, best)]
        used, price = job.reflection.used, Prices(self.config.prices).of(self.request.reflect)
        found = Found(
            self.request.prompt, run, best.version, job.scores.taken, len(job.tried), first.mean, best.mean,
            fmean(before), fmean(after),
            compare(after, before, self.request.seed) if best is not first else None,
            used.input + used.output, None if price is None else price.of(used),
        )  # fmt: skip
        metrics = {"method": self.request.method, "run": run, "validation": best.mean, "held_out": found.after}
        body = {"name": self.request.prompt, "text": best.text, "metrics": metrics, "promote": self.request.promote}
        await api.request("POST", "/prompts", body)
        return found

    async def _held_out(self, scores: PromptScores, candidate: Candidate) -> list[float]:
        tried = await scores.of(candidate.version, self.split.held_out, held_out=True)
        return [score.reward for score in tried]


def run_name(request: OptimizeRequest, split: Split, text: str) -> str:
    """Return the name of a run: the same for the same request, so that the same command resumes it."""
    parts: list[Any] = [request.method, request.prompt, text, request.command, request.seed]
    parts += [request.reflect, request.batch]
    parts += [asdict(request.sizes), *([task.line for task in tasks] for tasks in (split.lessons, split.validation))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def summary(found: Found, *, promoted: bool) -> str:
    """Return the result in words."""
    lines = [
        f"{found.tried} versions of {found.prompt} tried in {found.rollouts} rollouts (run {found.run})",
        f"validation tasks: {found.mean_before:.3f} before, {found.mean_after:.3f} with version {found.version}",
        f"the reflecting model used {found.reflect_tokens:,} tokens"
        + ("" if found.reflect_usd is None else f" ({found.reflect_usd:.4g} USD)"),
    ]
    if found.held_out is None:
        return "\n".join([*lines, "no version was better than the first one"])
    gain = found.held_out
    lines.append(
        f"held-out tasks: {found.before:.3f} before, {found.after:.3f} after: {gain.difference:+.3f} "
        f"[{gain.interval.low:+.3f}, {gain.interval.high:+.3f}] over {gain.tasks} tasks, p {gain.p:.2g}"
    )
    if promoted:
        lines.append(f"version {found.version} is live")
    else:
        lines.append(f"make it live: lightning-proxy prompts promote {found.prompt} {found.version}")
    return "\n".join(lines)


def _show(bar: Bar, scores: PromptScores, job: Search) -> None:
    bar.show(scores.taken, job.best.mean if job.tried else None, 0)
