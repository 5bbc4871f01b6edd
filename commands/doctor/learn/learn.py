"""`doctor --learn`: sees whether the user's own stack learns, by a few steps beside everything that is the user's."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from ....core.config.file import load_config
from ....core.config.root import Config
from ....core.errors import ConfigError, LightningError
from ....proxy.gateway.routing import difference
from ....serving.mode import publish_mode
from ....serving.swap import Swap, swap_lock
from ....serving.vllm import VllmFleet, operator_session
from ....store.opening import opened
from ....store.store import Store
from ....trainer.plugins import Run
from ...api_client import ApiClient, ApiError
from ...formats import print_json
from ...put_back import FRESH, LearnJournal, alone, forget, journal_path, put_back, put_back_if_left
from ...run.runner import Runner, runner_for
from ...run.tasks import Task, read_tasks
from ...signals import Interrupted, run_until_signal
from ...train import prepared, quiet
from ..checks import Broken, Check, Report, checks_table, failed, ok
from ..doctor import REACH_S, TIMEOUT_S, check_server
from ..vllm import VllmChecks
from .setup import TASKS, Setup, own_rate, second_system, served

ACTIVE_S = 600.0  # a rollout that did nothing for so long was forgotten, not ended
# So much nearer to the first answer than the trained weights' answer is the one that weights of before give.
NEARER, ALIKE = 4.0, 1e-3
WIDTHS = (7, 18)

TOKENS = 12
PROMPTS = (
    "Name an animal and say what it does.",
    "Describe the sea in a few words.",
    "What is good to eat in the morning?",
    "Tell me something about the moon.",
)
MORE = "Say it in another way."


@dataclass(frozen=True, slots=True)
class LearnRequest:
    """The options of the command line. Without a `command` a built-in agent works. `model`: for policy.model."""

    tasks: Path | None
    command: list[str]
    yes: bool
    as_json: bool
    preload: Sequence[str] = ()
    model: str | None = None


def learn_command(path: Path | None, request: LearnRequest) -> bool:
    """Print each check as it is made, and return whether none failed."""
    console = Console(highlight=False)

    def show(check: Check) -> None:
        if not request.as_json:
            console.print(checks_table([check], WIDTHS))

    report = Report(show)
    tasks = own_tasks() if request.tasks is None else read_tasks(request.tasks)[:TASKS]
    with suppress(Broken):
        try:
            run_until_signal(learn(path, request, tasks, report))
        except Interrupted:
            raise
        except LightningError as error:
            report(failed("learn", error.message, "docs/faults.md names what can be wrong"))
    if request.as_json:
        print_json([asdict(check) for check in report.checks])
    return not any(check.outcome == "failed" for check in report.checks)


async def learn(path: Path | None, request: LearnRequest, tasks: Sequence[Task], report: Report) -> None:
    """Make all checks in their order. Raise Broken at the first that failed; what was changed is put back."""
    try:
        config = load_config(path, {"policy.model": request.model})
    except ConfigError as error:
        report(failed("configuration", error.message, "correct it and run doctor again"))
        raise Broken from None
    report(await _own_proxy(config))
    if config.policy_upstream is None:
        names = ", ".join(upstream.name for upstream in config.upstreams)
        fix = "add an upstream with kind: vllm; providers' models are recorded and never trained"
        report(failed("policy", f"{names}: no upstream of kind vllm, so nothing can be trained", fix))
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(alone(config))
        except ConfigError as error:
            report(failed("trainer", error.message, "two trainers would share its memory, and the server"))
        try:
            settled = prepared(config, Run())
        except LightningError as error:
            report(failed("trainer", error.message, "correct it: `lightning-proxy train` would say the same"))
            raise Broken from None
        quiet()
        report(ok("trainer", "installed, and none works on this store"))
        await put_back_if_left(config, lambda line: report(ok("learn", line)))
        await _check_policy(config, report)
        if publish_mode(config) == "merged":
            await _check_weights(config, report, yes=request.yes)
        await _learn(settled, request, tasks, report)


async def _own_proxy(config: Config) -> Check:
    """Say whether the user's own proxy answers. It is asked for nothing that it would record."""
    async with ApiClient.of(config) as api:
        try:
            policy = await api.policy()
        except ApiError as error:
            return ok("your proxy", f"not needed: {error.message.partition(';')[0]}")
    found = f"{api.url} answers, policy version {policy['live_version']}, and records in {config.store.where}"
    return ok("your proxy", f"{found}; nothing of what follows goes through it")


async def _check_policy(config: Config, report: Report) -> None:
    """Check the policy's servers as `doctor` does."""
    upstream = config.policy_upstream
    assert upstream is not None
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=REACH_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for url in dict.fromkeys((*upstream.urls, *upstream.published_to)):
            report(await check_server(config, session, upstream, url))
        async for check in VllmChecks(config, session, upstream, publish_mode(config)).all():
            report(check)


async def _check_weights(config: Config, report: Report, *, yes: bool) -> None:
    """Check that the server's weights, which will be others for a while, are those to come back to, and not in use."""
    running, found = 0, ""
    async with operator_session() as session:
        fleet = VllmFleet.of(config, session)
        if config.store.may_be_there:
            async with opened(config.store, to_write=False) as database:
                store = Store(database)
                running = await store.rollouts.active(time.time() - ACTIVE_S)
                try:
                    problems = await Swap(store, fleet, "merged", config.policy.directory).problems()
                    found = "; ".join(str(problem) for problem in problems.values() if problem is not None)
                except LightningError as error:
                    found = error.message
        elif (label := await fleet.weight_version()) != FRESH:
            found = f"the server has weights of another store ({label})"
    if found:
        report(failed("weights", found, "start `lightning-proxy serve`, which loads what is live, or vLLM again"))
    if running and not yes:
        fix = "wait for them, or add --yes: their calls would be answered by weights of this check for some minutes"
        report(failed("weights", f"{running} rollouts run in {config.store.where}", fix))
    report(
        ok("weights", "the server's are replaced for some minutes (policy.publish: merged), and put back at the end")
    )


@dataclass(frozen=True, slots=True)
class _Served:
    """What a server has: its models with their files, and its answer to a fixed question by the base model."""

    models: dict[str, str | None]
    answer: list[Any]


async def _seen(fleet: VllmFleet, model: str | None = None) -> list[_Served]:
    """What each server that answers has; the answer is that of `model`, or else of the base model."""
    return [
        _Served(await server.adapters(), await server.probe(model or await server.base_model()))
        for server in await fleet.reachable()
    ]


async def _learn(config: Config, request: LearnRequest, tasks: Sequence[Task], report: Report) -> None:
    """Take the steps in a second system, and put everything back."""
    merged, path = publish_mode(config) == "merged", journal_path(config)
    with second_system(config, own_agent=bool(request.command)) as setup:
        journal = LearnJournal(setup.name, merged, tuple(map(str, setup.directories)))
        async with operator_session() as session:
            fleet = VllmFleet.of(config, session)
            before = await _seen(fleet)
            journal.write(path)
            trained: list[_Served] = []
            try:
                async with AsyncExitStack() as stack:
                    if merged:  # else the user's proxy would load the live weights again
                        await stack.enter_async_context(swap_lock(config.policy.directory))
                    model = await _steps(setup, config, request, tasks, report)
                    trained = await _seen(fleet, model)
            finally:
                with suppress(Broken):
                    await asyncio.shield(_put_back(config, journal, fleet, before, trained, report))


async def _put_back(
    config: Config,
    journal: LearnJournal,
    fleet: VllmFleet,
    before: list[_Served],
    trained: list[_Served],
    report: Report,
) -> None:
    """Put everything back, and check that it is."""
    name = "as before"
    try:
        await put_back(config, journal)
        after = await _seen(fleet)
    except LightningError as error:
        report(failed(name, error.message, "run it again: a journal beside the store says what to put back"))
        raise Broken from None
    forget(journal_path(config), journal)
    apart = max((difference(was.answer, now.answer) for was, now in zip(before, after, strict=False)), default=0.0)
    others = max((difference(was.answer, new.answer) for was, new in zip(before, trained, strict=False)), default=0.0)
    if [was.models for was in before] != [now.models for now in after] or apart > max(ALIKE, others / NEARER):
        fix = "`lightning-proxy status` says what is served; a restart of vLLM has its own weights again"
        report(failed(name, f"the server answers otherwise than before, by {apart:.3g} nats", fix))
    new = f"; the trained weights were {others:.3g} away" if trained else ""
    left = "no weights or rollouts of this check are left"
    report(ok(name, f"the server answers as before (to {apart:.1g} nats{new}); {left}"))


async def _steps(setup: Setup, config: Config, request: LearnRequest, tasks: Sequence[Task], report: Report) -> str:
    """Start the second system, and take the steps. Return the name that the trained weights are served under."""
    from ....proxy.dialects.as_chat.recorded import as_chat
    from ....trainer.loop import TrainingLoop
    from ....trainer.plugins import TrainerCore, plugins_of
    from ....trainer.publish import Publisher
    from ....trainer.train import open_engine, swap_of
    from .steps import LearnSteps

    second = setup.config
    async with (
        served(second), ApiClient.of(second) as api, _agent(second, request, api) as runner,
        opened(second.store) as database, operator_session() as session,
        open_engine(second, plugins_of(second)) as engine,
    ):  # fmt: skip
        store = Store(database)
        swap = await swap_of(second, store, session)
        publisher = Publisher(second.policy, store, swap, engine, setup.name)
        loop = TrainingLoop(TrainerCore(second, store, engine, Run(), swap), publisher, as_chat=as_chat)
        own = own_rate(config)
        await LearnSteps(second, api, runner, tasks, engine, loop, store, swap.vllm, own, report).run()
        return str((await store.versions.live()).served_model)


@asynccontextmanager
async def _agent(config: Config, request: LearnRequest, api: ApiClient) -> AsyncIterator[Runner]:
    """The user's program, or the built-in agent."""
    async with aiohttp.ClientSession() as session:
        if not request.command:
            yield BuiltInAgent(config.policy.alias, session)
            return
        runner = runner_for(config, request.command, request.preload, partial(print, file=sys.stderr))
        try:
            yield runner
        finally:
            await runner.close()


def own_tasks() -> list[Task]:
    """Return tasks that a model answers in many ways."""
    return [Task(f"doctor-{i}", json.dumps({"prompt": prompt})) for i, prompt in enumerate(PROMPTS)]


class BuiltInAgent:
    """A conversation of two turns, in place of a program. It is a `Runner`."""

    def __init__(self, model: str, session: aiohttp.ClientSession) -> None:
        self._model, self._session = model, session

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        """Ask twice. `log` gets an answer that is none."""
        url, key = env["OPENAI_BASE_URL"], {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        messages = [{"role": "user", "content": prompt_of(env["LIGHTNING_TASK"])}]
        for _ in range(2):
            body = {"model": self._model, "messages": messages, "max_tokens": TOKENS, "temperature": 1.0}
            async with self._session.post(f"{url}/chat/completions", json=body, headers=key) as answer:
                if answer.status != 200:
                    log.write_text(f"HTTP {answer.status}: {(await answer.text())[:500]}")
                    return 1
                message = (await answer.json())["choices"][0]["message"]
            said = {"role": "assistant", "content": message.get("content") or ""}
            messages += [said, {"role": "user", "content": MORE}]
        return 0

    async def close(self) -> None:
        return


def prompt_of(line: str) -> str:
    """Return a task's prompt: its `prompt` or `question`, or else its first text; the whole line without one.

    >>> prompt_of('{"task_id": "7", "question": "Why?"}')
    'Why?'
    """
    task: dict[str, Any] = json.loads(line)
    texts = {name: value for name, value in task.items() if isinstance(value, str) and name != "task_id"}
    return texts.get("prompt") or texts.get("question") or next(iter(texts.values()), line)
