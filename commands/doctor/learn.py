"""`doctor --learn`: checks that the user's own stack learns, with a training step in a second system."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...core.config.file import load_config
from ...core.config.root import Config
from ...core.errors import LightningError
from ...proxy.gateway.routing import difference
from ...serving.mode import publish_mode
from ...serving.swap import Swap, swap_lock
from ...serving.vllm import VllmFleet, operator_session
from ...store.opening import opened
from ...store.store import Store
from ...trainer.plugins import Run
from ..put_back import FRESH, alone, forget, journal_path, put_back, put_back_if_left
from ..run.tasks import Task, read_tasks
from ..signals import Interrupted, run_until_signal
from ..train import prepared, quiet
from .doctor import Broken, Finding, Report, VllmChecks, check_servers, open_session

ACTIVE_S = 600.0  # a rollout that did nothing for so long was forgotten, not ended
# How much nearer to the first answer restored weights must answer than trained ones, or how near, in nats.
NEARER, ALIKE = 4.0, 1e-3
# Questions that a model answers in many ways.
PROMPTS = (
    "Name an animal and say what it does.",
    "Describe the sea in a few words.",
    "What is good to eat in the morning?",
    "Tell me something about the moon.",
)
OWN_TASKS = [Task(f"doctor-{i}", json.dumps({"prompt": prompt})) for i, prompt in enumerate(PROMPTS)]


def learn_command(path: Path | None, tasks: Path | None, command: Sequence[str], *, as_json: bool) -> bool:
    """Print each check's result, at once or as JSON at the end, and return whether none failed."""
    report = Report(as_json=as_json, stops=True)
    chosen = OWN_TASKS if tasks is None else read_tasks(tasks)
    with suppress(Broken):
        try:
            run_until_signal(learn(load_config(path), chosen, command, report))
        except Interrupted:
            raise
        except LightningError as error:
            report.add("learn", "failed", error.message, "docs/running.md lists what can be wrong")
    return report.end()


async def learn(config: Config, tasks: Sequence[Task], command: Sequence[str], report: Report) -> None:
    """Run all checks in order, and restore what they changed. Raise Broken at the first that fails.

    Without a `command`, a built-in agent is used.
    """
    if (upstream := config.policy_upstream) is None:
        names = ", ".join(upstream.name for upstream in config.upstreams)
        found = f"no upstream is of kind vllm ({names}), so nothing can be trained"
        report.add("policy", "failed", found, "add an upstream with kind: vllm")
        return
    async with AsyncExitStack() as stack:

        async def trainer() -> str:
            nonlocal config
            await stack.enter_async_context(alone(config))
            config = prepared(config, Run())
            return "installed, and no other trainer is running on this store"

        await report.check("trainer", trainer(), "correct this: `lightning-proxy train` would fail in the same way")
        quiet()
        await put_back_if_left(config, partial(report.add, "learn", "ok"))
        async with open_session() as session:
            await check_servers(config, session, upstream, report)
            await VllmChecks(config, session, upstream).run(report)
        if publish_mode(config) == "merged":
            fix = "start `lightning-proxy serve`, which loads the live weights, or restart vLLM"
            await report.check("weights", _weights(config), fix)
        await _learn(config, tasks, command, report)


async def _weights(config: Config) -> str:
    """Check that the served weights are not in use and can be restored, since they are replaced for a while."""
    async with operator_session() as session:
        fleet = VllmFleet.of(config, session)
        if config.store.may_be_there:
            async with opened(config.store, to_write=False) as database:
                store = Store(database)
                if running := await store.rollouts.active(time.time() - ACTIVE_S):
                    fix = "wait until they have ended: this check's weights would answer their calls"
                    raise Finding(f"{running} rollouts are running in {config.store.where}", fix)
                problems = await Swap(store, fleet, "merged", config.policy.directory).problems()
                if found := "; ".join(str(problem) for problem in problems.values() if problem is not None):
                    raise Finding(found)
        elif (label := await fleet.weight_version()) != FRESH:
            raise Finding(f"the server has the weights of a version from another store ({label})")
    return "the server's weights are replaced for some minutes (policy.publish: merged), then restored"


Served = tuple[dict[str, str | None], list[Any]]


async def _served(fleet: VllmFleet, model: str | None = None) -> list[Served]:
    """Return, for each reachable server, its models with their paths, and its answer to a fixed question.

    The question goes to `model`, or else to the base model.
    """
    return [
        (await server.adapters(), await server.probe(model or await server.base_model()))
        for server in await fleet.reachable()
    ]


def _apart(some: list[Served], others: list[Served]) -> float:
    """Return the largest difference between the servers' answers, in nats."""
    return max((difference(one[1], other[1]) for one, other in zip(some, others, strict=False)), default=0.0)


async def _learn(config: Config, tasks: Sequence[Task], command: Sequence[str], report: Report) -> None:
    """Take the step in a second system, and restore everything."""
    from .steps import second_system, take_step

    async with AsyncExitStack() as stack:
        second, journal = stack.enter_context(second_system(config, own_agent=bool(command)))
        fleet = VllmFleet.of(config, await stack.enter_async_context(operator_session()))
        before, trained = await _served(fleet), list[Served]()

        async def undo() -> str:
            """Restore everything, and check the result."""
            await put_back(config, journal)
            after = await _served(fleet)
            forget(journal_path(config), journal)
            apart, others = _apart(before, after), _apart(before, trained)
            fix = "`lightning-proxy status` says what is served; restarting vLLM restores its original weights"
            if apart > max(ALIKE, others / NEARER):
                raise Finding(f"the server's answers differ from those before by {apart:.3g} nats", fix)
            if [one[0] for one in before] != [one[0] for one in after]:
                raise Finding("the list of models and adapters that the server serves differs from before", fix)
            return f"the server answers as before (within {apart:.1g} nats); nothing from this check is left"

        journal.write(journal_path(config))
        try:
            async with AsyncExitStack() as swapping:
                if journal.merged:  # else the user's proxy would load the live weights again
                    await swapping.enter_async_context(swap_lock(config.policy.directory))
                model = await take_step(config, second, journal.name, command, tasks, report)
                trained += await _served(fleet, model)
        finally:
            again = f"run `doctor --learn` again: {journal_path(config)} lists what to undo"
            with suppress(Broken):
                await asyncio.shield(report.check("as before", undo(), again))
