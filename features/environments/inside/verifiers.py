"""The kind `verifiers`: tasksets of verifiers, played by its own harnesses. Each seat is an agent of the rollout."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .play import ONLY_RECORDED, Arguments, Json, Scores

if TYPE_CHECKING:
    from ....client import Rollout

REQUIRES = ("verifiers==0.4.0",)
PACKAGES = ("verifiers.v1", "verifiers.v1.utils.loaders", "verifiers.v1.harnesses.utils.launch")


def names() -> Iterator[tuple[str, str]]:
    """Yield verifiers' own tasksets, and the installed packages that depend on verifiers."""
    from verifiers.v1 import tasksets

    for one in pkgutil.iter_modules(tasksets.__path__):
        yield one.name, "part of verifiers"
    for package in importlib.metadata.distributions():
        if any(re.match(r"verifiers\b", need) for need in package.requires or ()):
            yield package.name, package.metadata["Summary"] or ""


def tasks(name: str, given: Arguments) -> Iterator[Json]:
    """Yield tasks of a taskset, shuffled by the seed if their number is finite.

    `env`: verifiers' own `[env]`, such as {"agent": {"harness": {"id": "codex"}, "runtime": {"type": "docker"}}}.
    Other keys go to the taskset.
    """
    from verifiers.v1.utils.loaders import load_taskset

    env = given.take("env", {})
    env["taskset"] = {"id": name, **given.left}
    taskset = load_taskset(_config(env).taskset)
    ordered = taskset.shuffle(given.seed) if taskset.bounded else taskset
    for one in islice((one for one in ordered if given.has(one.key)), given.tasks):
        task_id = f"{re.sub('[^A-Za-z0-9._-]', '-', name)}-{one.key[:12]}"
        yield {"task_id": task_id, "idx": one.data.idx, "prompt": str(one.data.prompt), "env": env}


def play(task: Json, run: Rollout) -> Scores:
    """Play one episode. Measurements are named `SEAT.NAME`; if a seat runs several times, the mean counts."""
    episode = asyncio.run(_episode(task, run))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors) or "verifiers' episode failed")
    learns, measured = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for trace in episode.traces:
        seat = trace.agent.name
        if trace.agent.trainable:
            learns[seat].append(trace.reward)
        for name, one in (trace.metrics | trace.rewards).items():
            if one is not None:
                measured[f"{seat}.{name}"].append(getattr(one, "value", one))
    return Scores(*({name: fmean(values) for name, values in one.items()} for one in (learns, measured)))


async def _episode(task: Json, run: Rollout) -> Any:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.env import RunSlot
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils.loaders import load_environment

    _run_scripts_here()
    env = load_environment(_config(task["env"], run))
    set_up = env.setup

    async def set_up_and_mark(agents: Any) -> None:
        await set_up(agents)
        for agent in vars(agents)["_agents"].values():
            if not agent.trainable:
                headers = agent.ctx.client.headers | ONLY_RECORDED
                agent.ctx = replace(agent.ctx, client=agent.ctx.client.model_copy(update={"headers": headers}))

    env.setup = set_up_and_mark
    (one,) = env.taskset.include(idx=[task["idx"]])
    model = ModelContext(task["model"], EvalClientConfig(**_client(run)), SamplingConfig(**task["sampling"]))
    async with env.serving():
        return await env.run_slot(RunSlot(one), model)


def _config(env: Json, run: Rollout | None = None) -> Any:
    """The configuration for verifiers. By default, harnesses run on this machine, with `null` in place of `bash`."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.env import Env
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import default_harness_id, environment_class

    taskset = env["taskset"]["id"]
    kind = concrete_type(environment_class(taskset, env.get("id", "")), EnvConfig, origin=Env) or EnvConfig
    own: Json = {"runtime": {"type": "subprocess"}}
    if default_harness_id(taskset) == "bash":
        own["harness"] = {"id": "null"}
    seats = {}
    for seat in (name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)):
        client = {"client": _client(run.as_agent(seat))} if run is not None else {}
        seats[seat] = {**own, **client, **env.get(seat, {})}
    return kind.model_validate({**env, **seats})


def _client(run: Rollout) -> Json:
    return {"type": "eval", "base_url": run.base_url, "api_key_var": "OPENAI_API_KEY"}


def _run_scripts_here() -> None:
    """Have verifiers run its harnesses' program with this Python, not in an environment that uv would download."""
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes import subprocess

    subprocess.CACHE_DIR = Path.cwd() / "runtimes"
    scripts = subprocess.CACHE_DIR / "scripts"
    scripts.mkdir(parents=True)
    subprocess.SubprocessRuntime.scripts_dir = str(scripts)
    script = scripts / f"{hashlib.sha256(CHAT_PROGRAM_SOURCE.encode()).hexdigest()}.py"
    script.write_text(CHAT_PROGRAM_SOURCE)
    subprocess.SubprocessRuntime._interpreters[str(script)] = sys.executable
