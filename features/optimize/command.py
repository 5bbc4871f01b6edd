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
from ...commands.formats import print_json
from ...commands.run.command import run_options
from ...commands.run.report import ProgressView
from ...commands.run.runner import runner_for
from ...commands.run.tasks import read_tasks
from ...commands.signals import run_until_signal
from ...commands.system.processes import make_directory
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.prices import Prices, require_litellm
from ...core.statistics import compare
from .search import Candidate, Reflection, Search, Sizes, Split, apo_search, gepa_search

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
    sizes: Sizes
    seed: int
    concurrency: int
    promote: bool
    logs: Path | None
    as_json: bool


def optimize(config: Config, request: OptimizeRequest) -> None:
    """Run the command. Raise LightningError if it fails; what was tried until then is kept."""
    require_litellm(f"--reflect {request.reflect}")
    split, view = _split(request), ProgressView(Console(stderr=True))
    directory = make_directory(config.policy.directory / "optimize", "policy.directory")
    found = run_until_signal(_optimized(config, request, split, directory, view))
    if request.as_json:
        print_json(found)
    else:
        Console(stderr=True).print(summary(found, promoted=request.promote), markup=False, highlight=False)


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


async def _optimized(
    config: Config, request: OptimizeRequest, split: Split, directory: Path, view: ProgressView
) -> dict[str, Any]:
    """The outcome. `mean`s are over the validation tasks; `held_out`: how far the best is above the first there.

    `reflect_usd`: of the reflecting model; None without a price.
    """
    runner = runner_for(config, request.command, request.preload, view.say)
    options = run_options(config, 1, request.concurrency, "eval", request.logs)
    async with ApiClient.of(config, patience_s=60) as api:
        own = (await api.request("GET", f"/prompts/{quote(request.prompt, safe='')}"))["text"]
        run = run_name(request, split, own)
        reflection = Reflection(request.reflect, request.reflect_url, directory / f"{run}.jsonl", request.budget)
        with view:
            bar = view.bar("search", request.budget)

            def tell(best: Candidate) -> None:
                view.say(f"version {best.version}: {best.mean:.3f} on {len(split.validation)} tasks")

            def show(_: object) -> None:
                bar.show(job.taken, job.best.mean if job.tried else None, 0)

            job = Search(
                api, runner, options, prompt=request.prompt, run=run, budget=request.budget, split=split,
                failed_reward=config.trainer.failed_reward or 0.0, seed=request.seed, tell=tell, on_result=show,
            )  # fmt: skip
            try:
                await job.open()
                if job.taken:
                    view.say(f"run {run} resumes: {job.taken} of {request.budget} rollouts are done")
                search = apo_search if request.method == "apo" else gepa_search
                await search(job, reflection, own, request.sizes)
                if not job.tried:
                    raise ConfigError(f"--budget {request.budget} is less than one look at the validation tasks")
                await job.look_again()
                first, best = next(iter(job.tried.values())), job.best
                before, after = [
                    [score.reward for score in await job.scores(one.version, split.held_out, held_out=True)]
                    for one in (first, best)
                ]
            finally:
                await asyncio.shield(runner.close())
        spent, price = reflection.used, Prices(config.prices).of(request.reflect)
        metrics = {"method": request.method, "run": run, "validation": best.mean, "held_out": fmean(after)}
        body = {"name": request.prompt, "text": best.text, "metrics": metrics, "promote": request.promote}
        await api.request("POST", "/prompts", body)
    return {
        "prompt": request.prompt, "run": run, "version": best.version, "rollouts": job.taken, "tried": len(job.tried),
        "mean_before": first.mean, "mean_after": best.mean, "before": fmean(before), "after": fmean(after),
        "held_out": None if best is first else asdict(compare(after, before, request.seed)),
        "reflect_tokens": spent.input + spent.output, "reflect_usd": None if price is None else price.of(spent),
    }  # fmt: skip


def run_name(request: OptimizeRequest, split: Split, text: str) -> str:
    """Return the name of a run: the same for the same request, so that the same command resumes it."""
    parts: list[Any] = [request.method, request.prompt, text, request.command, request.seed, request.reflect]
    parts += [asdict(request.sizes), *([task.line for task in tasks] for tasks in (split.lessons, split.validation))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def summary(found: dict[str, Any], *, promoted: bool) -> str:
    """Return the result in words."""
    lines = [
        "{tried} versions of {prompt} tried in {rollouts} rollouts (run {run})",
        "validation tasks: {mean_before:.3f} before, {mean_after:.3f} with version {version}",
        "the reflecting model used {reflect_tokens:,} tokens",
    ]
    if found["reflect_usd"] is not None:
        lines[-1] += " ({reflect_usd:.4g} USD)"
    if found["held_out"] is None:
        lines.append("no version was better than the first one")
    else:
        lines.append(
            "held-out tasks: {before:.3f} before, {after:.3f} after: {held_out[difference]:+.3f} "
            "[{held_out[interval][low]:+.3f}, {held_out[interval][high]:+.3f}] over {held_out[tasks]} tasks, "
            "p {held_out[p]:.2g}"
        )
        promote = "make it live: lightning-proxy prompts promote {prompt} {version}"
        lines.append("version {version} is live" if promoted else promote)
    return "\n".join(lines).format_map(found)
