"""A training loop on a small model, with vLLM servers that are played over transformers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from aiohttp import web

from contract.model import ModelVllm
from contract.system import listening
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.features.promotion.config import PromotionConfig
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import VllmFleet, operator_session
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import Step
from lightning_proxy.trainer.loop import TrainingLoop
from lightning_proxy.trainer.plugins import Run, TrainerCore, plugins_of
from lightning_proxy.trainer.publish import Publisher
from lightning_proxy.trainer.train import engine_of
from lightning_proxy.trainer.verify import SURE
from support.models import VOCABULARY
from support.sections import with_features
from support.stores import store_url


class HonestServer(ModelVllm):
    """Answers from the weights that were loaded."""

    @property
    def models(self) -> set[str]:
        return {"base", *self.adapters}


class DeafServer(HonestServer):
    """Says yes to new weights and goes on serving the base model's."""

    def _open(self, path: str) -> Any:
        return super()._open(str(self.root))


class RestartingServer(HonestServer):
    """Restarted when it is first asked (or always, when it is asked) for one model."""

    restarts_at, always, restarts = "policy-v1", False, 0

    async def _complete(self, request: web.Request) -> web.Response:
        asked = (await request.json())["model"]
        if asked == self.restarts_at and (self.always or not self.restarts):
            self.restarts += 1
            self.restart()
        return await super()._complete(request)


def evenness(ids: Sequence[int]) -> float:
    return fmean(i % 2 == 0 for i in ids)


class Bench:
    """A store, a server and a trainer; `loop()` is the trainer's process after a start."""

    def __init__(self, given: dict[str, Any], database: Database, vllm: Any, servers: list[HonestServer]) -> None:
        self._given, self.config, self.vllm = given, with_features(**given), vllm
        self.server: Any = servers[0]
        self.replicas: Any = servers[1:]
        self.store = Store(database)
        self.random = random.Random(0)

    def loop(self, runs: Any = TrainingLoop, **trainer: Any) -> Any:
        config = with_features(**self._given | {"trainer": self._given["trainer"] | trainer})
        self.trainer: Any = engine_of(config, plugins_of(config))
        return runs(TrainerCore(config, self.store, self.trainer, Run()), self._publisher(config))

    def _publisher(self, config: Config) -> Publisher:
        if not config.section(PromotionConfig).is_gated:
            return Publisher(config.policy, self.store, self.swap, self.trainer)
        from lightning_proxy.features.promotion.gated import CandidateSwap, GatedPublisher
        from lightning_proxy.features.promotion.promotions import Promotions, candidates_server

        placed = candidates_server(self.config, Promotions(self.store.database))
        swap = CandidateSwap(self.store, self.vllm, self.mode, config.policy.directory, placed)
        return GatedPublisher(config, self.store, swap, self.trainer)

    @property
    def mode(self) -> Any:
        return self.config.policy.publish

    @property
    def swap(self) -> Swap:
        return Swap(self.store, self.vllm, self.mode, self.config.policy.directory)

    async def activate(self, version: int) -> None:
        """Make a version live by hand."""
        await self.swap.activate(await self.store.versions.get(version))

    async def live(self) -> tuple[int, int | None, bool]:
        """The live version, its step, and whether it is verified."""
        found = await self.store.versions.live()
        return found.version, found.step, found.verified

    async def last(self) -> Step:
        found = await self.store.steps.last()
        assert found is not None
        return found

    async def train(self, *tasks: str, agent: str | None = None, loop: Any = None, **trainer: Any) -> list[str]:
        """Record a whole group of every task, and train once on what waits; in a new process without a `loop`."""
        rollouts = await self.groups(*tasks, agent=agent)
        await (loop or self.loop(**trainer)).run(asyncio.Event(), once=True)
        return rollouts

    async def rollout(
        self, task: str, reward: float | None, *, version: int = 0, status: str | None = None, answer: int = 4,
        agent: str | None = None,
    ) -> str:  # fmt: skip
        """One recorded rollout of one call with `answer` tokens, ended with a reward or a status."""
        ids = tuple(self.random.randrange(2, VOCABULARY) for _ in range(answer))
        rollout_id = await self.record(task, Choice(0, ids, (-3.0,) * answer, "stop"), version, agent)
        if reward is not None:
            await self.reward(rollout_id, reward)
        if status is not None:
            await self.store.rollouts.end(rollout_id, status, None)  # type: ignore[arg-type]
        return rollout_id

    async def record(
        self, task: str | None, choice: Choice, version: int, agent: str | None = None, **asked: Any
    ) -> str:
        """A rollout of one call, still running. `asked`: more of its request."""
        rollout_id = f"{task}-{self.random.getrandbits(60)}"
        async with Recorder(self.store, merged=self.mode == "merged") as recorder:
            request = {"messages": [{"role": "user", "content": task}], **asked}
            name = RolloutName(rollout_id, task, agent)
            start = CallStart(rollout_id, name, "chat/completions", "policy", version, request, time.time())
            await recorder.start(start)
            await recorder.end(CallEnd(rollout_id, rollout_id, "ok", {}, 200, (0, 5, 6), (choice,)))
        return rollout_id

    async def reward(self, rollout_id: str, value: float) -> None:
        await self.store.rewards.post([Reward(rollout_id, value)], None, b"")

    async def sampled(
        self, task: str, version: int, worth: Callable[[Sequence[int]], float] = evenness, tokens: int = 4,
        heat: float = 1.0,
    ) -> None:  # fmt: skip
        """A rollout that the server samples at a temperature, rewarded by what its tokens are worth."""
        ids, logprobs = self.server._sample("base", [0, 5, 6], tokens, heat)
        choice = Choice(0, tuple(ids), tuple(logprobs), "stop")
        await self.reward(await self.record(task, choice, version, temperature=heat), worth(ids))

    async def groups(self, *tasks: str, agent: str | None = None) -> list[str]:
        """A whole group of every task, with rewards that differ."""
        size = self.config.trainer.group_size
        return [await self.rollout(task, float(i % 2), agent=agent) for task in tasks for i in range(size)]

    async def steps_of(self, rollouts: list[str]) -> set[int | None]:
        return {(await self.store.rollouts.get(r)).step for r in rollouts}


@asynccontextmanager
async def bench(
    base: Path, tmp_path: Path, publish: str = "merged", server: type[HonestServer] = HonestServer,
    replicas: Sequence[type[HonestServer]] = (), busy_timeout_s: float = 5.0, policy: dict[str, Any] | None = None,
    **trainer: Any,
) -> AsyncIterator[Bench]:  # fmt: skip
    servers = [kind(base) for kind in (server, *replicas)]
    async with AsyncExitStack() as stack:
        url, *others = [f"{await stack.enter_async_context(listening(played.app))}/v1" for played in servers]
        settings = {"group_size": 4, "tasks_per_step": 2, "learning_rate": 0.05, "report_to": [], "dtype": "float32"}
        given: dict[str, Any] = {
            "store": StoreConfig(url=store_url(tmp_path), busy_timeout_s=busy_timeout_s),
            "upstreams": [UpstreamConfig(name="policy", base_url=url, replicas=others)],
            "policy": {"model": str(base), "publish": publish, "directory": tmp_path / "policy", **(policy or {})},
            "trainer": {**settings, **trainer},
        }
        database = await stack.enter_async_context(opened(given["store"]))
        session = await stack.enter_async_context(operator_session())
        yield Bench(given, database, VllmFleet(session, given["upstreams"][0].urls), servers)


Start = Callable[..., AbstractAsyncContextManager[Bench]]  # `bench`, its model and directory given


async def require_seen_clearly(store: Store, version: int) -> None:
    """The step that made a version says how clearly the servers answered with its weights, each of them."""
    step = await store.steps.of_version(version)
    assert step is not None and step.metrics["verify_deviations"] >= SURE
    assert "verified_by" not in step.metrics and step.metrics["verify_difference"] < 0.01


async def sample_varied(b: Bench, version: int, times: int = 16, tokens: int = 4, heat: float = 1.0) -> None:
    """So many rollouts of each of four tasks, rewarded for tokens that differ from each other."""
    torch.manual_seed(version)
    for task in ("t1", "t2", "t3", "t4") * times:
        await b.sampled(task, version, lambda ids: len(set(ids)) / tokens, tokens, heat)


ABSURD = {"group_size": 16, "tasks_per_step": 4, "learning_rate": 10.0}
OWN_ADAPTERS = {"adapters": {"writer": ["writer", "rewriter"], "checker": ["checker"]}}
