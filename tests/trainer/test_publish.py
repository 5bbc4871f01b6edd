"""Publishing: new weights are verified, vLLM is waited for, and what it does not serve never counts."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lightning_proxy.core.errors import (
    LightningError,
    NotSaved,
    PublishError,
    TrainingUnavailable,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from lightning_proxy.serving.swap import NotServed, Swap
from lightning_proxy.serving.vllm import VllmError, VllmFault, VllmServer
from lightning_proxy.trainer.step.trainer import LightningTrainer
from support.training import DeafServer, HonestServer, RestartingServer, bench


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_proxy.serving.swap.LEAVE_S", 0.05)


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


async def test_a_vllm_that_restarts_during_verification_gets_the_weights_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        sample, restarts = VllmServer.sample, []

        async def restarted_at_first(*args: Any) -> Any:
            if not restarts:
                restarts.append(b.server.load("base", str(base)))
                b.server.label = "default"
            return await sample(*args)

        monkeypatch.setattr(VllmServer, "sample", restarted_at_first)
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.verified, live.status) == (1, True, "live")


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


async def test_an_adapter_that_ends_vllm_whenever_it_is_asked_is_not_published(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", RestartingServer) as b:
        assert isinstance(b.server, RestartingServer)
        b.server.always = True
        await b.groups("t1", "t2")
        with pytest.raises(PublishError, match="vLLM restarted 3 times while policy version 1 was verified"):
            await b.loop().run(asyncio.Event(), once=True)
        assert ((await b.store.versions.live()).version, b.server.restarts) == (0, 3 * b.config.policy.verify_samples)
        assert (await b.store.versions.get(1)).status == "failed"


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
    [("merged", "/collective_rpc")]
    + [("lora", f"/v1/{route}") for route in ("load_lora_adapter", "unload_lora_adapter", "completions")],
)
async def test_a_vllm_that_is_there_and_fails_is_asked_again_so_many_times(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, publish: str,
    faults_at: str, faults: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    monkeypatch.setattr("lightning_proxy.trainer.publish.FAULTS", 4)
    async with bench(base, tmp_path, publish, FaultyServer) as b:
        assert isinstance(b.server, FaultyServer)
        # In our own way, and in vLLM's; and for several answers at once.
        asked = {"/collective_rpc": 2, "/v1/completions": b.config.policy.verify_samples}.get(faults_at, 1)
        b.server.faults_at, b.server.faults = faults_at, faults * asked
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


@pytest.mark.parametrize("publish", ["merged", "lora"])
@pytest.mark.parametrize("missing", [NotSaved, TrainingUnavailable])
async def test_however_long_weights_cannot_be_written_the_rollouts_of_now_are_no_staler_for_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: str, missing: type[LightningError]
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    whole, tries, paths = LightningTrainer.save_weights, iter(range(5)), set[Path]()

    def away(self: LightningTrainer, directory: Path, *, merged: bool) -> None:
        if next(tries, None) is not None:
            paths.add(directory)
            raise missing("not now")
        whole(self, directory, merged=merged)

    monkeypatch.setattr(LightningTrainer, "save_weights", away)
    async with bench(base, tmp_path, publish, max_staleness=1) as b:
        await b.groups("t1", "t2")
        asked_before = await b.groups("t3", "t4")
        await b.loop().run(asyncio.Event(), once=True)
        assert [v.version for v in await b.store.versions.all()] == [0, 1, 2] and len(paths) == 1
        assert await b.steps_of(asked_before) == {2}


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


async def test_an_adapter_that_one_replica_does_not_serve_does_not_count(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", replicas=[DeafServer]) as b:
        await b.groups("t1", "t2")
        with pytest.raises(PublishError, match="does not serve the weights"):
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).version == 0


async def test_verification_goes_on_when_vllm_was_away(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        sample, tries = VllmServer.sample, []

        async def away_at_first(*args: Any) -> Any:
            tries.append(args)
            if len(tries) < 3:
                raise UpstreamUnreachable("away")
            return await sample(*args)

        monkeypatch.setattr(VllmServer, "sample", away_at_first)
        monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.step, live.verified) == (1, 1, True)


@pytest.mark.parametrize(
    ("between", "ends"), [(UpstreamUnreachable, False), (UpstreamTimeout, False), (NotSaved, True)]
)
async def test_faults_of_a_vllm_that_was_away_between_them_are_not_added_up(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: type[LightningError], ends: bool
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    monkeypatch.setattr("lightning_proxy.trainer.publish.FAULTS", 3)
    async with bench(base, tmp_path, "lora") as b:
        load, met = VllmServer.load_adapters, [VllmFault, VllmFault, between, VllmFault, VllmFault]

        async def faulty_at_first(*args: Any) -> None:
            if met:
                raise met.pop(0)("not now")
            await load(*args)

        monkeypatch.setattr(VllmServer, "load_adapters", faulty_at_first)
        await b.groups("t1", "t2")
        with pytest.raises(VllmFault) if ends else nullcontext():
            await b.loop().run(asyncio.Event(), once=True)
        assert (await b.store.versions.live()).step == (None if ends else 1)
        assert "publishing" not in {version.status for version in await b.store.versions.all()}
