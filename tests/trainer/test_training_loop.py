"""From stored rollouts to live weights: what is claimed, committed and published, and what a crash leaves behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
import yaml
from aiohttp import web
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_proxy.proxy.config.policy import PolicyConfig
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.config.trainer import TrainerConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.errors import (
    ConfigError,
    LightningError,
    NotSaved,
    PublishError,
    StoreUnavailable,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from lightning_proxy.proxy.policy.swap import NotServed, Swap
from lightning_proxy.proxy.policy.vllm import VllmError, VllmFault, VllmFleet, operator_session
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.database import Database
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, PolicyVersion, Reward, RolloutName
from lightning_proxy.trainer.judge.judge import Judge, JudgeError
from lightning_proxy.trainer.loop import TrainingLoop
from lightning_proxy.trainer.publish import Publisher, _difference
from lightning_proxy.trainer.report.metric_schema import METRICS
from lightning_proxy.trainer.sft.sft import SftRun
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch
from support.paths import EXAMPLES
from support.small_model import VOCABULARY, save_small_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("base"))


class HonestServer:
    """vLLM's routes as the publisher uses them, over transformers: answers come from the weights that were loaded."""

    def __init__(self, base: Path) -> None:
        self.base, self.label, self.paused = base, "default", False
        self.models: dict[str, Any] = {"base": self.open(str(base))}

    def open(self, path: str) -> Any:
        if (Path(path) / "adapter_config.json").exists():
            return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.base), path)
        return AutoModelForCausalLM.from_pretrained(path)

    def load(self, name: str, path: str) -> None:
        self.models[name] = self.open(path)

    async def handle(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text() or "{}")
        match request.path:
            case "/v1/models":
                data = [
                    {"id": n, "parent": None if n == "base" else "base", "root": str(self.base)} for n in self.models
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


class Bench:
    """A store, a server and a trainer; `loop()` is the trainer's process as it is after a start."""

    def __init__(self, config: Config, database: Database, vllm: Any, servers: list[HonestServer]) -> None:
        self.config, self.vllm = config, vllm
        self.server, *self.replicas = servers
        self.store = Store(database)
        self.random = random.Random(0)

    def loop(self, runs: Any = TrainingLoop, **trainer: Any) -> Any:
        config = self.config.model_copy(update={"trainer": self.config.trainer.model_copy(update=trainer)})
        swap = Swap(self.store, self.vllm, self.mode, config.policy.directory)
        self.trainer = LightningTrainer(config.trainer, config.policy)
        publisher = Publisher(config.policy, self.store, swap, self.trainer)
        return runs(config, self.store, self.trainer, publisher)

    @property
    def mode(self) -> Any:
        return self.config.policy.publish

    async def rollout(
        self,
        task: str,
        reward: float | None,
        *,
        version: int = 0,
        status: str | None = None,
        answer: int = 4,
        agent: str | None = None,
    ) -> str:
        """One recorded rollout of one call with `answer` tokens, ended with a reward or a status."""
        ids = tuple(self.random.randrange(2, VOCABULARY) for _ in range(answer))
        rollout_id = await self.record(task, Choice(0, ids, (-3.0,) * answer, "stop"), version, agent)
        if reward is not None:
            await self.store.rewards.post([Reward(rollout_id, reward)], None, b"")
        if status is not None:
            await self.store.rollouts.end(rollout_id, status, None)  # type: ignore[arg-type]
        return rollout_id

    async def record(self, task: str | None, choice: Choice, version: int, agent: str | None = None) -> str:
        """A rollout of one call, still running."""
        rollout_id = f"{task}-{self.random.getrandbits(60)}"
        async with Recorder(self.store, merged=self.mode == "merged") as recorder:
            request = {"messages": [{"role": "user", "content": task}]}
            name = RolloutName(rollout_id, task, agent)
            await recorder.start(
                CallStart(rollout_id, name, "chat/completions", "policy", version, request, time.time())
            )
            await recorder.end(CallEnd(rollout_id, rollout_id, "ok", {}, 200, (0, 5, 6), (choice,)))
        return rollout_id

    async def sampled(self, task: str | None, version: int) -> None:
        """A rollout that the server samples, rewarded by its share of even tokens."""
        answer = self.server.sample({"prompt": (0, 5, 6), "max_tokens": 4, "model": "base"})
        ids, logprobs = tuple(answer["token_ids"]), tuple(answer["logprobs"]["token_logprobs"])
        rollout_id = await self.record(task, Choice(0, ids, logprobs, "stop"), version)
        await self.store.rewards.post([Reward(rollout_id, fmean(i % 2 == 0 for i in ids))], None, b"")

    async def groups(self, *tasks: str, agent: str | None = None) -> list[str]:
        """A whole group of every task, with rewards that differ."""
        size = self.config.trainer.group_size
        return [await self.rollout(task, float(i % 2), agent=agent) for task in tasks for i in range(size)]

    async def steps_of(self, rollouts: list[str]) -> set[int | None]:
        return {(await self.store.rollouts.get(r)).step for r in rollouts}


@asynccontextmanager
async def bench(
    base: Path,
    tmp_path: Path,
    publish: str = "merged",
    server: type[HonestServer] = HonestServer,
    replicas: Sequence[type[HonestServer]] = (),
    busy_timeout_s: float = 5.0,
    policy: dict[str, Any] | None = None,
    **trainer: Any,
) -> AsyncIterator[Bench]:
    servers, runners = [kind(base) for kind in (server, *replicas)], []
    for played in servers:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", played.handle)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
    url, *others = (f"http://127.0.0.1:{runner.addresses[0][1]}/v1" for runner in runners)
    settings = {"group_size": 4, "tasks_per_step": 2, "learning_rate": 0.05, "report_to": [], "dtype": "float32"}
    config = Config(
        store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db", busy_timeout_s=busy_timeout_s),
        upstreams=[UpstreamConfig(name="policy", base_url=url, replicas=others)],
        policy=PolicyConfig.model_validate(
            {"model": str(base), "publish": publish, "directory": tmp_path / "policy", **(policy or {})}
        ),
        trainer=TrainerConfig.model_validate({**settings, **trainer}),
    )
    database = await Database.open(config.store)
    try:
        async with operator_session() as session:
            yield Bench(config, database, VllmFleet(session, config.upstreams[0].urls), servers)
    finally:
        await database.close()
        for runner in runners:
            await runner.cleanup()


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_step_makes_verified_weights_live(base: Path, tmp_path: Path, publish: str) -> None:
    async with bench(base, tmp_path, publish) as b:
        rollouts = await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.step, live.publish) == (1, 1, publish)
        assert await b.steps_of(rollouts) == {1}
        step = await b.store.steps.last()
        assert step is not None
        assert (step.version, step.metrics["reward_mean"], step.metrics["rollouts"]) == (1, 0.5, 8)
        assert not b.server.paused


async def test_a_step_reports_every_metric_of_the_schema_and_no_other(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, group_timeout_s=0.01, kl_metric=True) as b:
        await b.rollout("t1", 1.0)
        await asyncio.sleep(0.02)
        equal = [await b.rollout("t2", 1.0) for _ in range(4)]
        await b.groups("t4", "t5")
        await b.loop().run(asyncio.Event(), once=True)
        step = await b.store.steps.last()
        assert step is not None
        assert set(step.metrics) == {*METRICS, "reward_by_task"}
        # What was looked at before without a step to make of it counts for this one.
        assert step.metrics["groups"] == 4 and step.metrics["groups_trained"] == 2
        assert step.metrics["groups_equal"] == 1 and step.metrics["groups_incomplete"] == 1
        assert step.metrics["rollouts"] == 13 and step.metrics["rollouts_dropped"] == len(equal) + 1
        assert step.metrics["reward_mean"] == pytest.approx((1 + 4 + 4) / 13)
        assert step.metrics["reward_by_task"]["t4"] == {"mean": 0.5, "std": 0.5, "rollouts": 4.0}
        assert (step.metrics["version"], step.metrics["advantage_positive"]) == (1, 0.5)
        assert step.metrics["forward_backward_s"] <= step.metrics["step_s"]
        assert "reward_by_task" not in (await b.store.versions.get(1)).metrics


async def test_a_step_reaches_the_trackers_once_also_when_killed_before_it_was_told(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        loop, told = b.loop(), []
        with monkeypatch.context() as killed:
            killed.setattr(b.trainer, "report", None)
            with pytest.raises(TypeError):
                await loop.run(asyncio.Event(), once=True)
        for _ in range(2):
            loop = b.loop()
            monkeypatch.setattr(b.trainer, "report", told.append)
            await loop.run(asyncio.Event(), once=True)
        assert [metrics["version"] for metrics in told] == [1]


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_every_replica_gets_the_weights_and_is_verified(base: Path, tmp_path: Path, publish: str) -> None:
    async with bench(base, tmp_path, publish, replicas=[HonestServer]) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.verified) == (1, True)
        for server in (b.server, *b.replicas):
            assert (server.label.startswith("1-"), "policy-v1" in server.models) == (
                publish == "merged",
                publish == "lora",
            )
            assert not server.paused


class DyingServer(HonestServer):
    """Gone for good when it is first asked for an answer."""

    dead = False

    async def handle(self, request: web.Request) -> web.Response:
        self.dead |= request.path == "/v1/completions"
        if self.dead:
            assert request.transport is not None
            request.transport.abort()
        return await super().handle(request)


@pytest.mark.parametrize("publish", ["merged", "lora"])
@pytest.mark.parametrize("order", [(HonestServer, DyingServer), (DyingServer, HonestServer)])
async def test_a_replica_that_dies_while_it_is_verified_holds_nothing_up(
    base: Path, tmp_path: Path, publish: str, order: tuple[type[HonestServer], type[HonestServer]]
) -> None:
    async with bench(base, tmp_path, publish, order[0], replicas=[order[1]]) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.step, live.verified) == (1, 1, True)


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_weights_that_one_replica_does_not_serve_do_not_count(base: Path, tmp_path: Path, publish: str) -> None:
    async with bench(base, tmp_path, publish, replicas=[DeafServer]) as b:
        await b.groups("t1", "t2")
        with pytest.raises(PublishError, match="does not serve the weights"):
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 0


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_weights_that_are_not_served_do_not_count(base: Path, tmp_path: Path, publish: str) -> None:
    async with bench(base, tmp_path, publish, DeafServer) as b:
        await b.groups("t1", "t2")
        with pytest.raises(PublishError, match="does not serve the weights"):
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 0
        failed = await b.store.versions.get(1)
        assert failed.status == "failed"
        assert failed.error is not None and "differ" in failed.error


@pytest.mark.parametrize("moment", ["step", "save", "commit", "publish"])
async def test_after_a_crash_every_rollout_is_trained_once(
    base: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    async with bench(base, tmp_path) as b:
        first = await b.groups("t1", "t2")
        second = await b.groups("t3", "t4")
        loop = b.loop()
        await loop.resume()
        assert await loop.train_once()
        target, name = {
            "step": (b.trainer, "step"),
            "save": (b.trainer, "save"),
            "commit": (b.store.steps, "trained"),
            "publish": (b.vllm, "sample"),
        }[moment]
        with monkeypatch.context() as broken:
            broken.setattr(target, name, crash)
            with pytest.raises(Crash):
                await loop.train_once()
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(first) == {1}
        assert await b.steps_of(second) == {2}
        last, live = await b.store.steps.last(), await b.store.versions.live()
        assert last is not None
        assert (last.step, last.version) == (2, live.version)
        assert b.server.label == f"{live.version}-{int(live.created_at)}"
        assert {v.status for v in await b.store.versions.all()} <= {"live", "ready", "failed"}


async def test_what_teaches_nothing_is_dropped_with_a_reason(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, max_staleness=0) as b:
        useful = [await b.rollout("t1", r) for r in (0.0, 1.0, 1.0)]
        failed = await b.rollout("t1", None, status="failed")
        equal = [await b.rollout("t2", 0.5) for _ in range(4)]
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(useful) == {1}
        reasons = {r: (await b.store.rollouts.get(r)).dropped for r in [failed, *equal]}
        assert reasons[failed] == "failed or discarded"
        assert {reasons[r] for r in equal} == {"all rewards of the group are equal"}
        stale = [await b.rollout(task, float(i % 2)) for task in ("t3", "t4") for i in range(4)]
        await b.loop().run(asyncio.Event(), once=True)
        reasons = {(await b.store.rollouts.get(r)).dropped for r in stale}
        assert reasons == {"stale: sampled by too old a policy version"}


async def test_once_takes_what_is_ready_and_goes_on_after_groups_that_teach_nothing(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        equal = [await b.rollout(task, 0.5) for task in ("t1", "t2") for _ in range(4)]
        useful = await b.groups("t3")  # fewer groups than a step usually takes
        loop = b.loop()
        await loop.run(asyncio.Event(), once=True)
        assert {(await b.store.rollouts.get(r)).dropped for r in equal} == {"all rewards of the group are equal"}
        assert await b.steps_of(useful) == {1}
        alone = await b.groups("t4")
        await loop.resume()
        assert not await loop.train_once()  # without `once` it waits for more
        assert await b.steps_of(alone) == {None}


async def test_once_waits_for_a_judge_that_is_away(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(self: Judge, question: str) -> str:
        if "the step waits" not in caplog.text:
            raise JudgeError("trainer.judge: no answer")
        return "8"

    monkeypatch.setattr("lightning_proxy.trainer.loop.RETRY_S", 0.01)
    monkeypatch.setattr(Judge, "_ask", ask)
    async with bench(base, tmp_path, credit="judge", judge={"model": "scripted"}) as b:
        judged = await b.groups("t1")
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(judged) == {1}


async def test_tokens_of_another_tokenizer_end_no_step(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1")
        for i in range(4):
            other = await b.record("t2", Choice(0, (VOCABULARY,) * i + (3,), (-1.0,) * (i + 1), "stop"), 0)
            await b.store.rewards.post([Reward(other, float(i))], None, b"")
        await b.loop().run(asyncio.Event(), once=True)
        step = await b.store.steps.last()
        assert step is not None
        assert (step.metrics["calls"], step.metrics["calls_other_tokens"], step.metrics["skipped"]) == (5, 3, 0)
        assert "not the model's tokens" in str((await b.store.rollouts.get(other)).dropped)


async def test_rollouts_over_the_models_context_are_left_out_of_a_step(base: Path, tmp_path: Path) -> None:
    short = shutil.copytree(base, tmp_path / "short")
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 7}))
    async with bench(short, tmp_path) as b:
        fits = await b.groups("t1", "t2")
        longer = await b.rollout("t1", 0.5, answer=5)
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(fits) == {1}
        reason = (await b.store.rollouts.get(longer)).dropped
        assert reason == "longer than trainer.max_sample_tokens or the model's context"
        step = await b.store.steps.last()
        assert step is not None and (step.metrics["rows_too_long"], step.metrics["skipped"]) == (1.0, 0.0)


@pytest.mark.parametrize("settings", [{"baseline": "reinforce_pp"}, {"lone_rollouts": "running"}])
async def test_the_reward_rises_with_other_baselines_too(base: Path, tmp_path: Path, settings: dict[str, str]) -> None:
    """Rewarded: the share of even tokens in an answer. Rollouts are sampled by what is served, as an agent's are."""
    async with bench(base, tmp_path, group_size=8, tasks_per_step=4, learning_rate=0.02, **settings) as b:
        loop = b.loop()
        await loop.resume()
        for step in range(6):
            for i in range(32):
                task = None if "lone_rollouts" in settings else f"t{step}-{i // 8}"
                await b.sampled(task, (await b.store.versions.live()).version)
            await loop.train_once()  # unless there is nothing left to learn
        first, *_, last = [step.metrics["reward_mean"] for step in await b.store.steps.all()]
        assert first < 0.75 and last > 0.9
        assert not any("warnings" in step.metrics for step in await b.store.steps.all()), "it did not collapse"


async def test_an_incomplete_group_waits_and_is_then_taken_as_it_is(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, group_timeout_s=1.0) as b:
        rollouts = [await b.rollout("t1", r) for r in (0.0, 1.0)]
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(rollouts) == {None}
        await asyncio.sleep(1.1)
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(rollouts) == {1}


async def test_evaluations_and_untold_rollouts_are_never_trained_on(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, group_timeout_s=0.01) as b:
        running = await b.rollout("t1", None)
        await b.store.rollouts.open([(RolloutName("e1", "t2", None, "eval"), "h")], {})
        await b.store.rewards.post([Reward("e1", 1.0)], None, b"")
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of([running, "e1"]) == {None}
        assert await b.store.steps.last() is None


async def test_training_goes_on_from_a_version_made_live_by_hand(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        await b.groups("t3", "t4")
        await b.loop().run(asyncio.Event(), once=True)
        swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
        await swap.activate(await b.store.versions.get(1))
        await b.groups("t5", "t6")
        await b.loop().run(asyncio.Event(), once=True)
        last = await b.store.steps.last()
        assert last is not None
        assert (last.step, last.base, last.version) == (3, 1, 3)


async def test_a_loss_that_is_not_finite_changes_nothing_and_is_counted(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        rollouts = await b.groups("t1", "t2")
        loop = b.loop()
        whole = b.trainer.step

        def poisoned(batch: Batch) -> dict[str, float]:
            samples = tuple(replace(s, advantages=tuple(float("nan") for _ in s.advantages)) for s in batch.samples)
            return whole(replace(batch, samples=samples))

        monkeypatch.setattr(b.trainer, "step", poisoned)
        await loop.run(asyncio.Event(), once=True)
        last = await b.store.steps.last()
        assert last is not None
        assert (last.metrics["skipped"], last.version) == (1.0, None)
        assert "advantages not finite in rollouts " in last.metrics["skipped_because"]
        assert (await b.store.versions.live()).version == 0
        assert await b.steps_of(rollouts) == {1}


async def test_a_version_made_live_by_hand_during_a_step_stays_live(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        await b.groups("t3", "t4")
        loop = b.loop()
        await loop.resume()
        swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
        await swap.activate(await b.store.versions.get(0))  # while the next step is under way
        assert await loop.train_once()
        assert (await b.store.versions.live()).version == 0
        assert (await b.store.versions.get(2)).status == "failed"
        await b.groups("t5", "t6")
        await loop.run(asyncio.Event(), once=True)
        last = await b.store.steps.last()
        assert last is not None
        assert (last.step, last.base, last.version) == (3, 0, 3)


async def test_old_siblings_without_a_reward_do_not_end_the_wait_of_new_ones(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, group_timeout_s=1.0) as b:
        [await b.rollout("t1", None, status=status) for status in ("completed", "failed")]
        late = [await b.rollout("t2", None, status="completed") for _ in range(4)]
        await asyncio.sleep(1.1)
        new = await b.rollout("t1", 1.0)
        await b.store.rewards.post([Reward(late[0], 1.0)], None, b"")  # the others' rewards are on their way
        await b.loop().run(asyncio.Event(), once=True)
        for waiting in (new, late[0]):
            assert (await b.store.rollouts.get(waiting)).dropped is None


async def test_a_reward_that_asks_for_it_offers_the_whole_group_again(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        rollouts = await b.groups("t1", "t2")
        equal = [await b.rollout("t3", 0.5) for _ in range(4)]
        await b.loop().run(asyncio.Event(), once=True)
        for changed in (rollouts[0], equal[0]):
            await b.store.rewards.post([Reward(changed, 0.7, retrain=True)], None, b"")
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(rollouts[:4] + equal) == {2}
        assert await b.steps_of(rollouts[4:]) == {1}


async def test_rewards_of_calls_stand_in_for_the_rollouts_own(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        rollouts = [await b.rollout("t1", None) for _ in range(4)]
        for i, rollout in enumerate(rollouts):
            await b.store.rewards.post([Reward(rollout, float(i), call_id=rollout, final=True)], None, b"")
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of(rollouts) == {1}
        last = await b.store.steps.last()
        assert last is not None and last.metrics["reward_mean"] == 1.5


async def test_weights_that_were_not_verified_yet_are_verified_after_a_restart(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path, server=DeafServer) as b:
        await b.groups("t1", "t2")
        loop = b.loop()
        with monkeypatch.context() as killed:
            killed.setattr(b.vllm, "sample", None)  # the trainer dies at its first use
            with pytest.raises(TypeError):
                await loop.run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.verified) == (1, False)
        with pytest.raises(PublishError, match="does not serve the weights"):
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 0
        assert (await b.store.versions.get(1)).status == "failed"


async def test_a_version_made_live_by_hand_during_verification_stays_live(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        swap, sample = Swap(b.store, b.vllm, "merged", b.config.policy.directory), b.vllm.sample

        async def promoted_before(*args: Any) -> Any:
            await swap.activate(await b.store.versions.get(0))
            return await sample(*args)

        monkeypatch.setattr(b.vllm, "sample", promoted_before)
        await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 0
        assert b.server.label.startswith("0-")


async def test_a_vllm_that_restarts_during_verification_gets_the_weights_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        sample, restarts = b.vllm.sample, []

        async def restarted_at_first(*args: Any) -> Any:
            if not restarts:
                restarts.append(b.server.load("base", str(base)))
                b.server.label = "default"
            return await sample(*args)

        monkeypatch.setattr(b.vllm, "sample", restarted_at_first)
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.verified, live.status) == (1, True, "live")


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_trainer_that_is_stopped_waits_for_no_vllm_and_the_next_one_finishes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, publish: str
) -> None:
    async def away(*_: Any) -> Any:
        raise UpstreamUnreachable("away")

    async with bench(base, tmp_path, publish) as b:
        await b.groups("t1", "t2")
        stop = asyncio.Event()
        with monkeypatch.context() as broken:
            broken.setattr(b.vllm, "sample", away)
            broken.setattr("lightning_proxy.trainer.publish.RETRY_S", 3600.0)
            training = asyncio.create_task(b.loop().run(stop, once=True))
            while "verifying the published weights waits" not in caplog.text:
                assert not training.done()
                await asyncio.sleep(0.01)
            stop.set()
            await training
        assert (await b.store.versions.get(1)).status == ("live" if publish == "merged" else "publishing")
        assert not (await b.store.versions.get(1)).verified
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.step, live.verified) == (1, True)


async def test_verification_goes_on_when_vllm_was_away(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        sample, tries = b.vllm.sample, []

        async def away_at_first(*args: Any) -> Any:
            tries.append(args)
            if len(tries) < 3:
                raise UpstreamUnreachable("away")
            return await sample(*args)

        monkeypatch.setattr(b.vllm, "sample", away_at_first)
        monkeypatch.setattr("lightning_proxy.trainer.publish.VERIFY_TRIES", 1)
        monkeypatch.setattr("lightning_proxy.trainer.publish.RETRY_S", 0.01)
        monkeypatch.setattr("lightning_proxy.trainer.loop.RETRY_S", 0.01)
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.step, live.verified) == (1, 1, True)


async def test_weights_that_stay_the_old_ones_are_noticed_however_small_the_step(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, learning_rate=0.005) as b:
        await b.groups("t1", "t2")
        loop = b.loop()
        await loop.run(asyncio.Event(), once=True)
        serve, b.server.load = b.server.load, lambda *_: None  # type: ignore[method-assign]
        await b.groups("t3", "t4")
        with pytest.raises(PublishError, match="weights from before|does not serve"):
            await loop.run(asyncio.Event(), once=True)
        b.server.load = serve  # type: ignore[method-assign]


async def test_a_changed_way_of_publishing_publishes_the_last_step_anew(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "merged") as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
    async with bench(base, tmp_path, "lora") as b:
        swap = Swap(b.store, b.vllm, "lora", b.config.policy.directory)
        with pytest.raises(NotServed, match="published as merged"):
            await swap.restore(set())
        await b.loop().run(asyncio.Event(), once=True)
        await swap.restore(set())
        live = await b.store.versions.live()
        assert (live.version, live.step, live.publish, live.verified) == (2, 1, "lora", True)


async def test_what_was_stopped_is_not_published_in_another_way_either(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, **ABSURD) as b:
        await varied(b, 0)
        await b.loop().run(asyncio.Event(), once=True)
        await varied(b, 1)
    for _ in range(2):  # a restart changes nothing
        async with bench(base, tmp_path, "lora", **ABSURD) as b:
            await b.loop().run(asyncio.Event(), once=True)
            collapse, last = await b.store.steps.collapse(), await b.store.steps.last()
            live = await b.store.versions.live()
            assert collapse is not None and (collapse.sign, live.version) == ("reward", 1)
            assert last is not None and (last.step, last.version) == (1, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_two_processes_train_from_the_store_and_publish_until_the_launcher_ends(
    base: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with bench(base, tmp_path) as b:
        rollouts = await b.groups("t1", "t2")
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(b.config.model_dump(mode="json", exclude_unset=True)))
        launcher = EXAMPLES / "distributed" / "cpu.yaml"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", launcher),
            *("-m", "lightning_proxy.cli", "--config", config, "train"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        while not (await b.store.versions.live()).verified or (await b.store.versions.live()).version < 1:
            assert process.returncode is None, (await process.communicate())[0].decode()
            await asyncio.sleep(0.2)
        trainers = psutil.Process(process.pid).children(recursive=True)
        assert len(trainers) == 2
        process.send_signal(number)
        output = (await process.communicate())[0].decode()
        assert "RankLost" not in output and not psutil.wait_procs(trainers, timeout=10)[1]
        assert output.count("step 1  reward") == 1, "only one of them reports"
        assert await b.steps_of(rollouts) == {1}
        assert (await b.store.versions.live()).publish == "merged"


async def test_siblings_without_a_reward_do_not_make_a_group(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        untold = [await b.rollout("t1", None, status="completed") for _ in range(4)]
        waiting = await b.rollout("t1", 1.0)
        await b.loop().run(asyncio.Event(), once=True)
        assert await b.steps_of([*untold, waiting]) == {None}
        assert (await b.store.rollouts.get(waiting)).dropped is None


async def test_a_running_sibling_holds_nobody_up_and_its_late_result_is_kept(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, group_timeout_s=1.0) as b:
        quick = [await b.rollout("t1", r) for r in (0.0, 1.0, 1.0)]
        slow = await b.rollout("t1", None)
        loop, stop = b.loop(), asyncio.Event()
        training = asyncio.create_task(loop.run(stop))
        while await b.steps_of(quick) != {1}:
            assert not training.done()
            await asyncio.sleep(0.02)
        assert (await b.store.rollouts.get(slow)).status == "running"
        await b.store.rewards.post([Reward(slow, 0.5)], None, b"")
        while (await b.store.rollouts.get(slow)).dropped is None:
            assert not training.done()
            await asyncio.sleep(0.02)
        stop.set()
        await training
        late = await b.store.rollouts.get(slow)
        assert (late.dropped, late.reward, late.step) == ("no siblings", 0.5, None)
        last = await b.store.steps.last()
        assert last is not None and last.step == 1


async def test_agents_go_on_while_a_step_is_computed_and_what_they_do_is_the_next_steps(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        first = await b.groups("t1", "t2")
        loop = b.loop()
        computing, go_on, whole = threading.Event(), threading.Event(), b.trainer.step

        def held(batch: Batch) -> dict[str, float]:
            computing.set()
            assert go_on.wait(30)
            return whole(batch)

        monkeypatch.setattr(b.trainer, "step", held)
        training = asyncio.create_task(loop.run(asyncio.Event(), once=True))
        while not computing.is_set():
            await asyncio.sleep(0.01)
        second = await b.groups("t3", "t4")  # recorded and rewarded meanwhile
        assert not training.done()
        go_on.set()
        await training
        assert await b.steps_of(first) == {1}
        assert await b.steps_of(second) == {2}


@pytest.mark.parametrize("moment", ["claim", "trained", "set_live", "update_metrics"])
async def test_a_store_that_is_locked_for_long_is_waited_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.loop.RETRY_S", 0.05)
    async with bench(base, tmp_path, busy_timeout_s=0.1) as b:
        rollouts = await b.groups("t1", "t2")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        part = b.store.versions if moment == "set_live" else b.store.steps
        unlocked = getattr(part, moment)

        async def locked(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(part, moment, unlocked)
            other.execute("BEGIN IMMEDIATE")
            return await unlocked(*args, **kwargs)

        monkeypatch.setattr(part, moment, locked)
        training = asyncio.create_task(b.loop().run(asyncio.Event(), once=True))
        while "cannot be written" not in caplog.text:
            assert not training.done()
            await asyncio.sleep(0.01)
        other.execute("COMMIT")
        await training
        other.close()
        last = await b.store.steps.last()
        assert last is not None and "publish_s" in last.metrics
        assert await b.steps_of(rollouts) == {last.step}
        live = await b.store.versions.live()
        assert (live.step, live.verified) == (last.step, True)


async def test_no_step_is_taken_before_its_round_is_due(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    schedule = {"when": "rollouts", "every_rollouts": 12}
    async with bench(base, tmp_path, schedule=schedule, poll_s=0.01, max_steps=2) as b:
        early = await b.groups("t1", "t2")  # enough for a step
        training = asyncio.create_task(b.loop().run(asyncio.Event()))
        while "the trainer waits for 12 complete rollouts, 8 so far" not in caplog.text:
            assert not training.done() and await b.steps_of(early) == {None}
            await asyncio.sleep(0.01)
        late = await b.groups("t3")
        await training
        assert (await b.steps_of(early), await b.steps_of(late)) == ({1}, {2})


async def test_a_first_step_that_is_done_again_begins_with_the_weights_of_the_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.loop.RETRY_S", 0.01)
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        loop, began, failures = b.loop(), [], [StoreUnavailable("the store cannot be read")]
        step, first_steps = b.trainer.step, b.store.steps.first

        def watched(batch: Batch) -> dict[str, float]:
            began.append((b.trainer.adapter(), len(b.trainer.optimizer.state)))
            return step(batch)

        async def fails_once(limit: int) -> Any:  # between the step and its commit
            if began and failures:
                raise failures.pop()
            return await first_steps(limit)

        monkeypatch.setattr(b.trainer, "step", watched)
        monkeypatch.setattr(b.store.steps, "first", fails_once)
        await loop.run(asyncio.Event(), once=True)
        (first, moments), (again, moments_again) = began
        assert (moments, moments_again) == (0, 0)
        assert all(torch.equal(first[name], again[name]) for name in first)


async def test_a_round_takes_nothing_that_did_not_wait_when_it_began(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, schedule={"when": "rollouts", "every_rollouts": 9}) as b:
        await b.rollout("t0", 1.0)  # its siblings are still running, which keeps the round open
        await b.groups("t1", "t2")
        loop = b.loop()
        await loop.resume()
        assert [await loop._train_when_due(once=False) for _ in range(2)] == [True, False]
        late = await b.groups("t3")
        assert not await loop._train_when_due(once=False), "5 of 9 wait"
        assert await b.steps_of(late) == {None}
        late += await b.groups("t4")
        assert await loop._train_when_due(once=False), "enough for another round"
        assert await b.steps_of(late) == {2}


async def varied(b: Bench, version: int) -> None:
    """Rollouts of four tasks that the server samples, rewarded for tokens that differ from each other."""
    torch.manual_seed(version)
    for task in ("t1", "t2", "t3", "t4") * 16:
        answer = b.server.sample({"prompt": (0, 5, 6), "max_tokens": 4, "model": "base"})
        ids, logprobs = tuple(answer["token_ids"]), tuple(answer["logprobs"]["token_logprobs"])
        rollout_id = await b.record(task, Choice(0, ids, logprobs, "stop"), version)
        await b.store.rewards.post([Reward(rollout_id, len(set(ids)) / 4)], None, b"")


ABSURD = {"group_size": 16, "tasks_per_step": 4, "learning_rate": 10.0}


async def test_a_policy_that_collapses_is_trained_no_further_until_it_is_rolled_back(
    base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, **ABSURD) as b:
        await varied(b, 0)
        await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 1
        await varied(b, 1)
        for _ in range(2):  # a restart changes nothing
            await b.groups("t5", "t6", "t7", "t8")
            await b.loop().run(asyncio.Event(), once=True)
            collapse = await b.store.steps.collapse()
            assert collapse is not None and (collapse.sign, collapse.go_back_to) == ("reward", 0)
            last = await b.store.steps.last()
            assert last is not None and last.step == 1
        swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
        await swap.activate(await b.store.versions.get(0))
        await b.loop(learning_rate=0.01).run(asyncio.Event(), once=True)
        _, second, *_ = await b.store.steps.all()
        assert (second.base, second.version, await b.store.steps.collapse()) == (0, 2, None)


async def test_a_policy_that_collapses_is_rolled_back_by_itself_if_so_configured(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, **ABSURD, collapse={"action": "rollback"}) as b:
        await varied(b, 0)
        await b.loop().run(asyncio.Event(), once=True)
        await varied(b, 1)
        await b.loop(max_steps=1).run(asyncio.Event())
        assert (await b.store.versions.live()).version == 1, "it is done, and looks no more"
        await b.loop().run(asyncio.Event(), once=True)
        steps = await b.store.steps.all()
        assert [(step.base, step.version) for step in steps[:2]] == [(0, 1), (0, 2)]
        assert steps[0].metrics["collapse"]["sign"] == "reward"


async def test_a_step_that_was_stopped_is_committed_and_never_published(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, collapse={"max_kl": 1e-9, "steps": 2}) as b:
        rollouts = await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        rollouts += await b.groups("t3", "t4")
        for _ in range(2):
            await b.loop().run(asyncio.Event(), once=True)
            waiting = await b.groups("t5", "t6")
            first, last = await b.store.steps.all()
            assert (first.version, list(first.metrics["warnings"])) == (1, ["kl"])
            assert (last.base, last.version, last.metrics["collapse"]["sign"]) == (1, None, "kl")
            assert last.checkpoint is not None and "publish_s" in last.metrics
            assert (await b.store.versions.live()).version == 1
        assert await b.steps_of(rollouts) == {1, 2} and await b.steps_of(waiting) == {None}
        swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
        await swap.activate(await b.store.versions.get(1))  # not the weights after step 2
        loop = b.loop(max_steps=3)
        await loop.run(asyncio.Event(), once=True)
        last = await b.store.steps.last()
        assert last is not None and (last.step, last.base) == (3, 1)
        assert "collapse" not in last.metrics, "one step in a row"


async def test_a_collapse_that_shows_while_a_step_waits_to_be_published_stops_it(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(base, tmp_path) as b:
        for task in ("t1", "t2"):
            for reward in (1.0,) * 9 + (0.0,):
                await b.rollout(task, reward)
        await b.loop(group_size=10).run(asyncio.Event(), once=True)
        await b.groups("t3", "t4")
        with pytest.MonkeyPatch.context() as killed:
            killed.setattr(Publisher, "publish", None)
            with pytest.raises(TypeError):
                await b.loop().run(asyncio.Event(), once=True)
        for _ in range(20):
            for task in ("t1", "t2"):
                await b.rollout(task, 0.0, version=1)
        stop = asyncio.Event()
        training = asyncio.create_task(b.loop(poll_s=0.01).run(stop))
        while (collapse := await b.store.steps.collapse()) is None:
            await asyncio.sleep(0.02)
        assert collapse.sign == "reward" and (await b.store.versions.live()).version == 1
        await b.store.versions.set_live(1)
        await b.groups("t5", "t6")
        while (await b.store.versions.live()).version == 1:
            await asyncio.sleep(0.02)
        stop.set()
        await training
        assert [(s.base, s.version) for s in await b.store.steps.all()] == [(0, 1), (1, None), (1, 2)]
        assert "policy version 1 was made live: training goes on from it" in caplog.text, "not from step 2"


async def test_versions_that_may_be_gone_back_to_keep_files_and_checkpoints_also_after_a_kill(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        """As if the process had been killed."""

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    async with bench(base, tmp_path) as b:
        for step in range(1, 7):
            await b.groups(f"t{step}", f"u{step}")
            if step == 6:
                with monkeypatch.context() as broken, pytest.raises(Crash):
                    broken.setattr(b.vllm, "sample", crash)
                    await b.loop().run(asyncio.Event(), once=True)
            await b.loop().run(asyncio.Event(), once=True)
        versions = {v.version: v.path is not None for v in await b.store.versions.all()}
        assert versions == {0: False, 1: True, 2: False, 3: True, 4: True, 5: True, 6: True}
        assert (tmp_path / "policy/checkpoints/1").is_dir()


OWN_ADAPTERS = {"adapters": {"writer": ["writer", "rewriter"], "checker": ["checker"]}}


def adapter_files(version: PolicyVersion, name: str = "") -> dict[str, torch.Tensor]:
    return load_file(Path(str(version.path)) / name / "adapter_model.safetensors")


async def test_a_version_holds_an_adapter_of_each_agent_and_a_step_moves_those_it_has_samples_of(
    base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, "lora", policy=OWN_ADAPTERS) as b:
        await b.groups("t1", agent="rewriter")
        await b.groups("t2")  # of no name
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.verified, live.served_model) == (1, True, "policy-v1")
        assert live.adapters == {"writer": "policy-v1.writer", "checker": "policy-v1.checker"}
        assert set(b.server.models) == {"base", *live.served_models}
        moved = {name: any(w.any() for key, w in adapter_files(live, name).items() if "lora_B" in key)
                 for name in ("", "writer", "checker")}  # fmt: skip
        assert moved == {"": True, "writer": True, "checker": False}
        await b.groups("t3", "t4", agent="checker")
        await b.loop().run(asyncio.Event(), once=True)
        second = await b.store.versions.live()
        for name, stays in (("", True), ("writer", True), ("checker", False)):
            before, after = adapter_files(live, name), adapter_files(second, name)
            assert all(torch.equal(before[key], after[key]) for key in before) == stays, name


async def test_all_adapters_of_a_version_are_served_again_after_a_restart_and_go_with_it(
    base: Path, tmp_path: Path
) -> None:
    unwatched = {"collapse": {"action": "off"}}  # no version to go back to stays
    async with bench(base, tmp_path, "lora", policy=OWN_ADAPTERS | {"keep_versions": 2}, **unwatched) as b:
        await b.groups("t1", "t2", agent="writer")
        await b.loop().run(asyncio.Event(), once=True)
        swap = Swap(b.store, b.vllm, "lora", b.config.policy.directory)
        for lost in (list((await b.store.versions.live()).served_models), ["policy-v1.checker"]):
            for name in lost:
                del b.server.models[name]
            await swap.restore(set())
            assert set(b.server.models) == {"base", "policy-v1", "policy-v1.writer", "policy-v1.checker"}
        for tasks in (("t3", "t4"), ("t5", "t6")):
            await b.groups(*tasks, agent="checker")
            await b.loop().run(asyncio.Event(), once=True)
        served = {f"policy-v{v}{own}" for v in (2, 3) for own in ("", ".writer", ".checker")}
        assert set(b.server.models) == {"base", *served}
        assert (await b.store.versions.get(1)).path is None


class RestartingServer(HonestServer):
    """Restarted when it is first asked (or always, when it is asked) for one adapter: it knows none then."""

    restarts_at, always, restarts = "policy-v1", False, 0

    async def handle(self, request: web.Request) -> web.Response:
        asked = (await request.json())["model"] if request.path == "/v1/completions" else None
        if asked == self.restarts_at and (self.always or not self.restarts):
            self.restarts += 1
            self.models = {"base": self.models["base"]}
        return await super().handle(request)


@pytest.mark.parametrize("replicas", [(), (HonestServer,)])
@pytest.mark.parametrize(
    "policy, restarts_at", [({}, "policy-v1"), (OWN_ADAPTERS, "policy-v1"), (OWN_ADAPTERS, "policy-v1.checker")]
)
async def test_a_vllm_that_restarts_during_verification_gets_all_adapters_again(
    base: Path, tmp_path: Path, replicas: Sequence[type[HonestServer]], policy: dict[str, Any], restarts_at: str
) -> None:
    async with bench(base, tmp_path, "lora", RestartingServer, replicas, policy=policy) as b:
        assert isinstance(b.server, RestartingServer)
        b.server.restarts_at = restarts_at
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.verified, b.server.restarts) == (1, True, 1)
        for server in (b.server, *b.replicas):
            assert set(server.models) == {"base", *live.served_models}


async def test_an_adapter_that_ends_vllm_whenever_it_is_asked_is_not_published(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", RestartingServer) as b:
        assert isinstance(b.server, RestartingServer)
        b.server.always = True
        await b.groups("t1", "t2")
        with pytest.raises(PublishError, match="vLLM was restarted 3 times while policy version 1 was verified"):
            await b.loop().run(asyncio.Event(), once=True)
        assert ((await b.store.versions.live()).version, b.server.restarts) == (0, 3)
        assert (await b.store.versions.get(1)).status == "failed"


async def test_what_vllm_refuses_for_another_reason_is_said(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> Any:
        raise VllmError("too long")

    async with bench(base, tmp_path, "lora") as b:
        await b.groups("t1", "t2")
        monkeypatch.setattr(b.vllm, "sample", refused)
        with pytest.raises(VllmError, match="too long"):
            await b.loop().run(asyncio.Event(), once=True)


class FaultyServer(HonestServer):
    """Answers 500, so many times, at one route; but for unloading, it does what it is told all the same."""

    faults_at, faults = "", 0

    async def handle(self, request: web.Request) -> web.Response:
        fails = request.path == self.faults_at and self.faults > 0
        self.faults -= fails
        if not fails or "unload" not in request.path:
            answer = await super().handle(request)
        return web.json_response({"error": {"message": "EngineCore died"}}, status=500) if fails else answer


@pytest.mark.parametrize("faults", [3, 100])
@pytest.mark.parametrize(
    ("publish", "faults_at"),
    [
        ("lora", "/v1/load_lora_adapter"),
        ("lora", "/v1/unload_lora_adapter"),
        ("lora", "/v1/completions"),
        ("merged", "/collective_rpc"),
    ],
)
async def test_a_vllm_that_is_there_and_fails_is_asked_again_so_many_times(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    publish: str,
    faults_at: str,
    faults: int,
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.loop.RETRY_S", 0.01)
    monkeypatch.setattr("lightning_proxy.trainer.loop.FAULTS", 4)
    async with bench(base, tmp_path, publish, FaultyServer) as b:
        assert isinstance(b.server, FaultyServer)
        b.server.faults_at, b.server.faults = faults_at, faults
        if "unload" in faults_at:  # another store's
            b.server.models |= {f"policy-v{version}": None for version in range(1, 10)}
        rollouts = await b.groups("t1", "t2")
        if faults == 100:
            with pytest.raises(VllmError, match=f"vLLM answered 500 to POST {faults_at}.*EngineCore died"):
                await b.loop().run(asyncio.Event(), once=True)
            assert (await b.store.versions.live()).version == 0
            *_, last = await b.store.versions.all()
            assert (last.status, last.path) == ("failed", None)
            assert last.error is not None and last.error.startswith("vLLM answered 500 to POST")
            b.server.faults = 0
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.step, live.verified, await b.steps_of(rollouts)) == (1, True, {1})
        assert caplog.text.count("publishing step 1 is tried again") == 3
        assert "publishing step 1 is tried again (3 of 3): vLLM answered 500" in caplog.text


@pytest.mark.parametrize(
    ("between", "ends"), [(UpstreamUnreachable, False), (UpstreamTimeout, False), (NotSaved, True)]
)
async def test_faults_of_a_vllm_that_was_away_between_them_are_not_added_up(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: type[LightningError], ends: bool
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.loop.RETRY_S", 0.01)
    monkeypatch.setattr("lightning_proxy.trainer.loop.FAULTS", 3)
    async with bench(base, tmp_path, "lora") as b:
        load, met = b.vllm.load_adapter, [VllmFault, VllmFault, between, VllmFault, VllmFault]

        async def faulty_at_first(*args: Any) -> None:
            if met:
                raise met.pop(0)("not now")
            await load(*args)

        monkeypatch.setattr(b.vllm, "load_adapter", faulty_at_first)
        await b.groups("t1", "t2")
        with pytest.raises(VllmFault) if ends else nullcontext():
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).step == (None if ends else 1)
        assert "publishing" not in {version.status for version in await b.store.versions.all()}


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_however_long_the_disk_is_full_the_rollouts_of_now_are_no_staler_for_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: str
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.loop.RETRY_S", 0.01)
    whole, tries = LightningTrainer.save_weights, iter(range(5))

    def full(self: LightningTrainer, directory: Path, *, merged: bool) -> None:
        if next(tries, None) is not None:
            raise NotSaved("the disk is full")
        whole(self, directory, merged=merged)

    monkeypatch.setattr(LightningTrainer, "save_weights", full)
    async with bench(base, tmp_path, publish, max_staleness=1) as b:
        await b.groups("t1", "t2")
        asked_before = await b.groups("t3", "t4")
        await b.loop().run(asyncio.Event(), once=True)
        assert [v.version for v in await b.store.versions.all()] == [0, 1, 2]
        assert await b.steps_of(asked_before) == {2}


def test_an_answer_without_tokens_says_nothing_of_what_is_served() -> None:
    assert _difference([[0.0, -1.0, -2.0], [0.0, -3.0]], [([7], [-1.5]), ([], [])]) == 0.5
    assert math.isnan(_difference([[0.0, -3.0]], [([], [])]))


class MixedUpServer(HonestServer):
    """Serves the writer's weights to the checker, too."""

    def load(self, name: str, path: str) -> None:
        super().load(name, path.replace("checker", "writer"))


async def test_an_adapter_that_is_not_served_keeps_the_whole_version_from_going_live(
    base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, "lora", MixedUpServer, policy=OWN_ADAPTERS) as b:
        await b.groups("t1", "t2", agent="checker")
        with pytest.raises(PublishError, match=r"were published as policy-v1\.checker"):
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 0
        assert (await b.store.versions.get(1)).status == "failed"


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_fine_tuned_weights_are_published_and_rl_goes_on_with_the_next_version(
    base: Path, tmp_path: Path, publish: str
) -> None:
    async with bench(base, tmp_path, publish, sft={"learning_rate": 0.01, "epochs": 2}) as b:
        rollouts = await b.groups("t1", "t2")
        await b.loop(SftRun).run(asyncio.Event())
        live = await b.store.versions.live()
        assert (live.version, live.verified, await b.steps_of(rollouts)) == (1, True, {None})
        await b.loop().run(asyncio.Event(), once=True)
        steps = await b.store.steps.all()
        assert [(s.metrics.get("method"), s.base, s.version) for s in steps] == [("sft", 0, 1), (None, 1, 2)]
        assert await b.steps_of(rollouts) == {2}
        assert (await b.store.versions.live()).verified


@pytest.mark.parametrize("moment", ["commit", "publish"])
async def test_a_fine_tuning_run_that_was_killed_is_one_version(
    base: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    async with bench(base, tmp_path, sft={"learning_rate": 0.01, "epochs": 2}) as b:
        await b.groups("t1", "t2")
        run = b.loop(SftRun)
        with monkeypatch.context() as broken:
            broken.setattr(*{"commit": (b.store.steps, "trained"), "publish": (b.vllm, "sample")}[moment], crash)
            with pytest.raises(Crash):
                await run.run(asyncio.Event())
        weights = b.trainer.adapter()
        await b.loop(SftRun).run(asyncio.Event())
        assert len(await b.store.steps.all()) == 1
        assert ((await b.store.versions.live()).step, (await b.store.versions.live()).verified) == (1, True)
        for name, weight in b.trainer.adapter().items():
            assert torch.allclose(weight, weights[name], atol=1e-6), name


async def test_adapters_of_agents_are_not_fine_tuned(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", policy=OWN_ADAPTERS) as b:
        with pytest.raises(ConfigError, match="not for policy.adapters yet"):
            b.loop(SftRun)


async def test_nothing_is_fine_tuned_while_publication_is_stopped(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, collapse={"max_kl": 1e-9, "steps": 1}) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        with pytest.raises(LightningError, match="publication is stopped: .* `lightning-proxy policy promote 0`"):
            await b.loop(SftRun).run(asyncio.Event())
        assert len(await b.store.steps.all()) == 1
