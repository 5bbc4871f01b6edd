"""A training loop on a small model, with vLLM servers that are played over transformers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from aiohttp import web
from peft import PeftModel
from transformers import AutoModelForCausalLM

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
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.train import engine_of
from lightning_proxy.trainer.verify import SURE
from support.models import VOCABULARY
from support.sections import PolicyConfig, TrainerConfig, with_features
from support.stores import store_url


def learner(model: Path, directory: Path, adapters: Any = None, **settings: Any) -> LightningTrainer:
    """A trainer in float32 without a loop. `settings`: of the section `trainer`."""
    given = {"learning_rate": 1e-2, "lora_rank": 4, "report_to": [], "dtype": "float32", **settings}
    publish: Any = "lora" if adapters else "auto"
    policy = PolicyConfig(model=str(model), directory=directory, adapters=adapters or {}, publish=publish)
    return LightningTrainer(TrainerConfig.model_validate(given), policy)


class HonestServer:
    """vLLM's routes as the publisher uses them, over transformers: answers come from the weights that were loaded."""

    def __init__(self, base: Path) -> None:
        self.base, self.label, self.paused = base, "default", False
        self.models: dict[str, Any] = {"base": self.open(str(base))}
        self.roots: dict[str, str] = {}
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self.handle)

    def open(self, path: str) -> Any:
        if (Path(path) / "adapter_config.json").exists():
            return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.base), path).merge_and_unload()
        return AutoModelForCausalLM.from_pretrained(path)

    def load(self, name: str, path: str) -> None:
        self.models[name] = self.open(path)

    async def handle(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text() or "{}")
        match request.path:
            case "/v1/models":
                data = [
                    {"id": n, "parent": None if n == "base" else "base", "root": self.roots.get(n, str(self.base))}
                    for n in self.models
                ]
                return web.json_response({"data": data})
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/is_paused":
                return web.json_response({"is_paused": self.paused})
            case "/pause" | "/resume":
                self.paused = request.path == "/pause"
            case "/collective_rpc":
                self.load("base", body["kwargs"]["weights_path"])
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/v1/load_lora_adapter":
                self.roots[body["lora_name"]] = body["lora_path"]
                self.load(body["lora_name"], body["lora_path"])
            case "/v1/unload_lora_adapter":
                del self.models[body["lora_name"]]
            case "/v1/completions" if body["model"] not in self.models:
                return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
            case "/v1/completions":
                return web.json_response({"choices": [self.sample(body)]})
        return web.json_response({})

    @torch.no_grad()
    def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, logprobs = list(body["prompt"]), []
        for _ in range(body["max_tokens"]):
            found = self.models[body["model"]](input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(torch.multinomial(found.exp(), 1)))
            logprobs.append(float(found[ids[-1]]))
        return {"token_ids": ids[len(body["prompt"]) :], "logprobs": {"token_logprobs": logprobs}}


class DeafServer(HonestServer):
    """Says yes to new weights and goes on serving the old ones."""

    def load(self, name: str, path: str) -> None:
        self.models[name] = self.models["base"]


class RestartingServer(HonestServer):
    """Restarted when it is first asked (or always, when it is asked) for one adapter: it knows none then."""

    restarts_at, always, restarts = "policy-v1", False, 0

    async def handle(self, request: web.Request) -> web.Response:
        asked = (await request.json())["model"] if request.path == "/v1/completions" else None
        if asked == self.restarts_at and (self.always or not self.restarts):
            self.restarts += 1
            self.models = {"base": self.models["base"]}
        return await super().handle(request)


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

    async def train(self, *tasks: str, agent: str | None = None, **trainer: Any) -> list[str]:
        """Record a whole group of every task, and train once on what waits, in a process that was just started."""
        rollouts = await self.groups(*tasks, agent=agent)
        await self.loop(**trainer).run(asyncio.Event(), once=True)
        return rollouts

    async def rollout(
        self, task: str, reward: float | None, *, version: int = 0, status: str | None = None, answer: int = 4,
        agent: str | None = None,
    ) -> str:  # fmt: skip
        """One recorded rollout of one call with `answer` tokens, ended with a reward or a status."""
        ids = tuple(self.random.randrange(2, VOCABULARY) for _ in range(answer))
        rollout_id = await self.record(task, Choice(0, ids, (-3.0,) * answer, "stop"), version, agent)
        if reward is not None:
            await self.store.rewards.post([Reward(rollout_id, reward)], None, b"")
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

    async def sampled(self, task: str | None, version: int, worth: Callable[[Sequence[int]], float] = evenness) -> None:
        """A rollout that the server samples, rewarded by what its tokens are worth."""
        answer = self.server.sample({"prompt": (0, 5, 6), "max_tokens": 4, "model": "base"})
        ids, logprobs = tuple(answer["token_ids"]), tuple(answer["logprobs"]["token_logprobs"])
        rollout_id = await self.record(task, Choice(0, ids, logprobs, "stop"), version)
        await self.store.rewards.post([Reward(rollout_id, worth(ids))], None, b"")

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


async def sample_varied(b: Bench, version: int) -> None:
    """Rollouts of four tasks that the server samples, rewarded for tokens that differ from each other."""
    torch.manual_seed(version)
    for task in ("t1", "t2", "t3", "t4") * 16:
        await b.sampled(task, version, lambda ids: len(set(ids)) / 4)


ABSURD = {"group_size": 16, "tasks_per_step": 4, "learning_rate": 10.0}
OWN_ADAPTERS = {"adapters": {"writer": ["writer", "rewriter"], "checker": ["checker"]}}
