"""Takes a training step on a synthetic reward in a second system, and checks each link of it. Needs torch.

The second system has its own proxy, store and policy directory.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
from uvicorn import Config as Settings
from uvicorn import Server

from ...core.config.root import Config
from ...core.config.trainer import TrainerConfig
from ...core.errors import LightningError
from ...proxy.app import create_app
from ...proxy.dialects.as_chat.recorded import as_chat
from ...serving.mode import publish_mode
from ...serving.operator import key_file, operator_headers
from ...serving.vllm import operator_session
from ...store.opening import opened
from ...store.store import Store
from ...trainer.loop import TrainingLoop
from ...trainer.plan import model_config, shape_of
from ...trainer.plugins import Run, TrainerCore, plugins_of
from ...trainer.publish import Publisher
from ...trainer.rate import WIDTH, rate_of
from ...trainer.step.step_metrics import nats_apart, wrong_sampler
from ...trainer.train import open_engine, swap_of
from ...trainer.types import Batch
from ...trainer.verify import SURE
from ...trainer.waiting import in_thread
from ...trainer.weights import tolerance
from ..api_client import ApiClient
from ..put_back import LearnJournal
from ..run.run import RunOptions, require_success, run_tasks
from ..run.runner import Runner, runner_for
from ..run.tasks import Task
from ..serve import uvicorn_options
from ..system.processes import free_port
from .doctor import Doubt, Finding, Report

REWARD = "doctor"  # other rewards, such as an agent posts for itself, do not count
GROUP_SIZE, TASKS = 8, 4
CONCURRENCY = 16
TOKENS = 12  # of each answer of the built-in agent
# A step with less is too small for a server's answers to show.
LEAST_RATE = {"lora": 1e-4, "full": 1e-5}
PUBLISH_S = 240.0
SHUFFLES = 2000
LARGEST_P = 0.01  # the largest p-value that counts
FAULTS = "docs/running.md says what to do"
NOT_SERVED = (
    "start vLLM with `lightning-proxy vllm`, which adds --enable-lora and --max-lora-rank; behind a router, name every "
    "server in upstreams.servers; give vLLM and trainer the same model and dtype; vLLM's log says more"
)

Json = dict[str, Any]


@contextmanager
def second_system(config: Config, *, own_agent: bool) -> Iterator[tuple[Config, LearnJournal]]:
    """Yield the second system's configuration and journal. Its directories are removed at the end.

    Its store is a file next to the user's store, or in `policy.directory` if that is on PostgreSQL. Its weights are
    below `policy.directory`, which the policy's servers can read. `own_agent`: whether the user's agent is used. Then
    the settings for agents are kept, and those for credit unless they name a feature's function.
    """
    name = f"lightning-doctor-{secrets.token_hex(2)}"
    place = config.policy.directory if config.store.is_postgres else config.store.path.parent
    weights = config.policy.directory.absolute() / name
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=place.absolute()) as directory:
        try:
            weights.mkdir(parents=True)
            operator_headers(config.policy.directory)  # makes the key
            shutil.copy(key_file(config.policy.directory), key_file(weights))
            second = _second(config, Path(directory), weights, own_agent=own_agent)
            yield second, LearnJournal(name, publish_mode(config) == "merged", (directory, str(weights)))
        finally:
            shutil.rmtree(weights, ignore_errors=True)


def _second(config: Config, directory: Path, weights: Path, *, own_agent: bool) -> Config:
    """The user's configuration, changed so that nothing reaches the user's store, served names or trackers.

    Of the features' sections, only that of a training service is kept: no judge, teacher, gate or telemetry.
    """
    services = {section.name for section in config.sections if not section.trains_here}
    sections: dict[str, Any] = config.model_dump(include={*Config.model_fields, *services})
    sections["proxy"] = {"port": free_port()}
    sections["store"] = {"url": f"sqlite:///{directory / 'store.db'}"}
    sections["rewards"], sections["rollouts"] = {}, {}
    sections["policy"] |= {"directory": weights, "publish": publish_mode(config), "adapters": {}}
    sections["trainer"] |= {
        "group_size": GROUP_SIZE, "tasks_per_step": TASKS, "reward_weights": {REWARD: 1},
        "learning_rate": max(_own_rate(config), LEAST_RATE[config.trainer.weights]),
        "schedule": {}, "lr_scheduler": "constant", "warmup_steps": 0, "max_steps": None, "dynamic_sampling": False,
        "lone_rollouts": "drop", "context_loss": None, "air": {}, "collapse": {"action": "off"}, "report_to": [],
        **({} if own_agent else {"agents": None, "agent_credit": "team"}),
    }  # fmt: skip
    named = config.trainer.credits.values()
    if not own_agent or not all(name in TrainerConfig.functions["credit"] or ":" in name for name in named):
        sections["trainer"]["credit"] = "uniform"
    return Config.model_validate(sections)


def _own_rate(config: Config) -> float:
    shape = shape_of(model_config(str(config.policy.model)) or {})
    return rate_of(config.trainer, shape.hidden if shape else WIDTH).value


@asynccontextmanager
async def served(config: Config) -> AsyncIterator[None]:
    """Serve the proxy of this configuration during the block."""
    server = Server(Settings(create_app(config), loop="asyncio", **uvicorn_options(config.proxy)))
    thread = threading.Thread(target=server.run, daemon=True)  # signals are this process's own
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise LightningError("the second proxy could not start; see the lines above")
            await asyncio.sleep(0.05)
        yield
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join)


class BuiltInAgent:
    """A Runner with an agent in this process, which makes one call to `model`."""

    def __init__(self, model: str, session: aiohttp.ClientSession) -> None:
        self._model, self._session = model, session

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        """Return 0; if the call fails, return 1 and write the reason to the log."""
        messages = [{"role": "user", "content": json.loads(env["LIGHTNING_TASK"])["prompt"]}]
        body = {"model": self._model, "messages": messages, "max_tokens": TOKENS, "temperature": 1.0}
        url, headers = env["OPENAI_BASE_URL"], {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        async with self._session.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            if answer.status >= 400:
                log.write_text(f"HTTP {answer.status}: {await answer.text()}\n")
                return 1
        return 0

    async def close(self) -> None:
        pass


async def take_step(
    config: Config, second: Config, name: str, command: Sequence[str], tasks: Sequence[Task], report: Report
) -> str:
    """Start the second system and take a step. Return the name under which the trained weights are served.

    `config` is the user's configuration, and `name` the prefix of the adapters' names.
    """
    async with (
        served(second), ApiClient.of(second) as api, AsyncExitStack() as closing, aiohttp.ClientSession() as agents,
        opened(second.store) as database, operator_session() as session,
        open_engine(second, plugins_of(second)) as engine,
    ):  # fmt: skip
        runner: Runner = BuiltInAgent(second.policy.alias, agents)
        if command:
            runner = runner_for(second, command, [], partial(print, file=sys.stderr))
        closing.push_async_callback(runner.close)
        store = Store(database)
        swap = await swap_of(second, store, session)
        core = TrainerCore(second, store, engine, Run(), swap)
        loop = TrainingLoop(core, Publisher(second.policy, store, swap, engine, name), as_chat=as_chat)
        await LearnStep(core, api, runner, tasks[:TASKS], loop, _own_rate(config)).run(report)
        return str((await store.versions.live()).served_model)


class LearnStep:
    """A step in the second system. `core` is its trainer, `rate` the user's learning rate."""

    def __init__(
        self, core: TrainerCore, api: ApiClient, runner: Runner, tasks: Sequence[Task], loop: TrainingLoop, rate: float
    ) -> None:
        self._core, self._api, self._runner, self._tasks, self._loop = core, api, runner, tasks, loop
        self._rate = rate
        self._rollouts, self._rewards = list[Json](), dict[str, float]()  # rewards by rollout
        self._batch: Batch
        self._metrics: Json = {}
        self._before: list[float] = []

    async def run(self, report: Report) -> None:
        """Take the step, and report each check."""
        await self._loop.resume()
        for name, probe, fix in (
            ("agent", self._work, "correct the agent; `lightning-proxy run` shows more of its output"),
            ("calls", self._read, "docs/training.md says what is recorded; `doctor` names what a server lacks"),
            ("rewards", self._reward, "look at the lines above: the proxy says why it refused them"),
            ("advantages", self._advantages, FAULTS),
            ("ratios", self._ratios, FAULTS),
            ("likelier", self._likelier, "run it again; if it persists, check your own trainer.loss or credit"),
            ("new weights", self._publish, NOT_SERVED),
        ):
            await report.check(name, probe(), fix)

    async def _work(self) -> str:
        """Let the agent work on every task."""
        options = RunOptions(GROUP_SIZE, CONCURRENCY, timeout_s=self._core.config.run.timeout_s)
        results = await run_tasks(self._api, self._tasks, self._runner, options)
        require_success(results)
        ended = [result for result in results if not result.failed]
        self._rollouts = [await self._api.rollout(result.rollout_id) for result in ended]
        calls = sum(len(rollout["calls"]) for rollout in self._rollouts)
        if not calls:
            fix = "have the agent call OPENAI_BASE_URL, which `doctor` and `run` set"
            raise Finding(f"{len(ended)} runs ended without a call through the proxy", fix)
        lost = "" if len(ended) == len(results) else f"; {len(results) - len(ended)} runs failed"
        return f"{len(ended)} rollouts of {len(self._tasks)} tasks made {calls} calls{lost}"

    async def _read(self) -> str:
        """Check that calls arrived with their tokens."""
        calls = [call for rollout in self._rollouts for call in rollout["calls"]]
        if all(call["policy_version"] is None for call in calls):
            asked = Counter(str(call["request"].get("model")) for call in calls).most_common(1)[0][0]
            found = f"no call asks for the policy's model, so none can be trained on; most common model: {asked!r}"
            raise Finding(found, f"have the agent ask for the model {self._core.config.policy.alias!r}")
        reasons = Counter(str(call["untrainable_reason"]) for call in calls if not call["trainable"])
        good = len(calls) - reasons.total()
        found = f"{good} of {len(calls)} calls have their sampled tokens and log-probabilities"
        if reasons:
            found += f"; the most common reason for the others: {reasons.most_common(1)[0][0]}"
            raise (Doubt if good else Finding)(found)
        return found

    async def _reward(self) -> str:
        """Reward answers that contain the token by which siblings differ most, and check that the rewards arrived."""
        answers: dict[str, dict[str, set[int]]] = {}  # the sampled tokens by task and rollout
        for rollout in self._rollouts:
            sampled = {token for call in rollout["calls"] for token in call["response_token_ids"] or ()}
            answers.setdefault(rollout["task_id"], {})[rollout["rollout_id"]] = sampled

        def spread(token: int) -> float:
            shares = [fmean(token in sampled for sampled in of_task.values()) for of_task in answers.values()]
            return sum(share * (1 - share) for share in shares)

        every = {name: sampled for of_task in answers.values() for name, sampled in of_task.items()}
        best = max(sorted(set().union(*every.values())), key=spread, default=None)
        self._rewards = {name: float(best in sampled) for name, sampled in every.items()}
        body = [{"rollout_id": name, "reward": reward, "name": REWARD} for name, reward in self._rewards.items()]
        await self._api.request("POST", "/reward", body)
        if missing := [name for name in self._rewards if (await self._api.rollout(name))["reward"] is None]:
            raise Finding(f"{len(missing)} of {len(body)} rewards did not arrive")
        return f"reward 1 for an answer with token {best}, 0 for others, {fmean(self._rewards.values()):.2f} on average"

    async def _advantages(self) -> str:
        """Check that the rewards tell siblings apart."""
        batch = await self._loop.collector.next_batch(self._loop.base, fewer=True)
        if batch is None:
            dropped = Counter([(await self._api.rollout(rollout))["dropped"] for rollout in self._rewards])
            why = dropped.most_common(1)[0][0]
            alike = "sample at temperature 1, with other tasks: siblings that all answer alike teach nothing"
            raise Finding(f"nothing to learn from; most common reason: {why}", alike if "equal" in str(why) else None)
        self._batch = batch
        nonzero = sum(any(sample.advantages) for sample in batch.samples)
        return f"{nonzero} of {len(batch.samples)} training rows have advantages other than 0"

    async def _ratios(self) -> str:
        """Take the step, and check that the trainer found the sampled tokens as likely as the server had reported."""
        engine = self._core.engine
        self._before = await self._logprobs()
        await in_thread(engine.forward_backward, self._batch)
        self._metrics = metrics = await in_thread(engine.optim_step)
        kl, allowed = metrics.get("kl", 0.0), tolerance(engine.settings, self._core.config.policy)
        mean = f"{metrics['ratio_mean']:.4f} on average"
        if fix := wrong_sampler(kl, allowed):
            raise Finding(f"with unchanged weights, ratios are not 1 but {mean} ({nats_apart(kl):.2g} nats off)", fix)
        if metrics["skipped"]:
            raise Finding(f"the step was skipped: {engine.skipped_because}")
        return f"with unchanged weights, ratios are 1: {mean}, {metrics['ratio_max']:.3f} at most"

    async def _logprobs(self) -> list[float]:
        """Return, for each row, the sum of its sampled tokens' log-probabilities under the trainer's weights."""
        samples = self._batch.samples
        found = await in_thread(self._core.engine.logprobs, [sample.token_ids for sample in samples])
        return [math.fsum(np.multiply(row, sample.mask)) for row, sample in zip(found, samples, strict=True)]

    async def _likelier(self) -> str:
        """Check that the step raised the likelihood of rewarded answers more than that of their siblings."""
        changes: dict[str, dict[str, float]] = {}
        after = await self._logprobs()
        for sample, old, new in zip(self._batch.samples, self._before, after, strict=True):
            of_task = changes.setdefault(sample.task_id, {})
            of_task[sample.rollout_id] = of_task.get(sample.rollout_id, 0.0) + new - old
        groups = [([self._rewards[name] for name in task], [*task.values()]) for task in changes.values()]
        (nats, p), rate = likelier(groups), self._core.engine.rate.value
        gained = f"{nats:+.3g} nats (p = {p:.2g}), at a learning rate of {rate:g}"
        if rate != self._rate:
            gained += f" (yours is {self._rate:g})"
        if nats <= 0 or p > LARGEST_P:
            raise Finding(f"the step did not clearly make rewarded answers likelier: {gained}")
        return f"the step made rewarded answers gain on the rest: {gained}"

    async def _publish(self) -> str:
        """Publish the step's weights, and check that the server answers with them and not with the earlier ones."""
        try:
            async with asyncio.timeout(PUBLISH_S):
                await self._loop.conclude(self._batch, self._metrics)
                self._metrics |= await self._loop.verify_live()
        except TimeoutError:
            fix = "the lines above say what publishing waits for; look at vLLM's log"
            raise Finding(f"the new weights are not live after {PUBLISH_S:.0f} s", fix) from None
        apart = float(self._metrics.get("verify_deviations", 0.0))
        shown = f"{apart:.0f} standard deviations apart"
        if apart < SURE:
            found = f"the server reports the new weights but answers like the old ones: {shown}"
            raise Doubt(found, "the step was small: a larger trainer.learning_rate would make it visible")
        return f"the server answers with the new weights, not the old ones: {shown}"


def likelier(groups: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int = 0) -> tuple[float, float]:
    """Return by how many nats an answer gained on its siblings per point of reward, and the p-value of the gain.

    Each group has its answers' rewards and the changes of their log-probabilities. The p-value is from a permutation
    test: it says how often rewards that are shuffled among siblings explain the changes at least as well.

    >>> likelier([([1, 0, 1, 0], [0.5, 0.1, 0.5, 0.1])])[0]
    0.4
    """
    rng = np.random.default_rng(seed)
    covariance, spread, shuffled = 0.0, 0.0, np.zeros(SHUFFLES)
    for rewards, changes in groups:
        r, c = np.asarray(rewards, dtype=float), np.asarray(changes, dtype=float)
        r, c = r - r.mean(), c - c.mean()
        covariance += float(r @ c)
        spread += float(r @ r)
        shuffled += rng.permuted(np.tile(r, (SHUFFLES, 1)), axis=1) @ c
    as_good = int((shuffled >= covariance - 1e-12).sum())
    return covariance / spread if spread else 0.0, (1 + as_good) / (1 + SHUFFLES)
