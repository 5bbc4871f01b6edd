"""Publishing: new weights are verified, vLLM is waited for, and what it does not serve never counts."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from safetensors.torch import load_file

from lightning_proxy.core import errors
from lightning_proxy.core.errors import LightningError, NotSaved, PublishError, UpstreamUnreachable
from lightning_proxy.core.records import PolicyVersion, RolloutName
from lightning_proxy.serving.swap import NotServed
from lightning_proxy.serving.vllm import VllmError, VllmFault, VllmServer
from lightning_proxy.trainer.step.trainer import LightningTrainer
from support.training import OWN_ADAPTERS, DeafServer, HonestServer, RestartingServer, Start, require_seen_clearly


async def test_a_changed_way_of_publishing_publishes_the_last_step_anew(bench: Start) -> None:
    async with bench("merged") as b:
        await b.train("t1", "t2")
    async with bench("lora") as b:
        with pytest.raises(NotServed, match="published as merged"):
            await b.swap.restore(set())
        await b.train()
        await b.swap.restore(set())
        assert await b.live() == (2, 1, True) and (await b.store.versions.live()).publish == "lora"


@pytest.mark.parametrize(
    ("publish", "fails_at"),
    [("merged", "/collective_rpc")]
    + [("lora", f"/v1/{route}") for route in ("load_lora_adapter", "unload_lora_adapter", "completions")],
)
async def test_a_vllm_that_is_there_and_fails_is_asked_again_so_many_times(
    bench: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, publish: str, fails_at: str
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.publish.FAULTS", 4)
    async with bench(publish) as b:
        b.server.refuses[fails_at] = 500
        if "unload" in fails_at:  # another store's
            b.server.adapters = {f"policy-v{version}": "" for version in range(1, 10)}
        rollouts = await b.groups("t1", "t2")
        with pytest.raises(VllmError, match=f"vLLM answered POST {fails_at} with HTTP 500"):
            await b.train()
        *_, last = await b.store.versions.all()
        assert ((await b.live())[0], last.status, last.path) == (0, "failed", None)
        assert str(last.error).startswith("vLLM answered POST")
        assert caplog.text.count("publishing step 1 is tried again (3 of 3): vLLM answered POST") == 1
        b.server.refuses.clear()
        await b.train()
        assert ((await b.live())[1:], await b.steps_of(rollouts)) == ((1, True), {1})


@pytest.mark.parametrize("missing", [NotSaved, errors.TrainingUnavailable])
async def test_however_long_weights_cannot_be_written_the_rollouts_of_now_are_no_staler_for_it(
    bench: Start, monkeypatch: pytest.MonkeyPatch, missing: type[LightningError]
) -> None:
    whole, tries, paths = LightningTrainer.save_weights, iter(range(5)), set[Path]()

    def away(self: LightningTrainer, directory: Path, *, merged: bool) -> None:
        if next(tries, None) is not None:
            paths.add(directory)
            raise missing("not now")
        whole(self, directory, merged=merged)

    monkeypatch.setattr(LightningTrainer, "save_weights", away)
    async with bench(max_staleness=1) as b:
        await b.groups("t1", "t2")
        asked_before = await b.train("t3", "t4")
        assert [v.version for v in await b.store.versions.all()] == [0, 1, 2] and len(paths) == 1
        assert await b.steps_of(asked_before) == {2}


class DyingServer(HonestServer):
    """Gone for good when it is first asked for an answer."""

    dead = False

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.dead |= request.path == "/v1/completions"
        if self.dead:
            assert request.transport is not None
            request.transport.abort()
        return await super()._refuse(request, handler)


@pytest.mark.parametrize("publish", ["merged", "lora"])
@pytest.mark.parametrize("order", [(HonestServer, DyingServer), (DyingServer, HonestServer)])
async def test_a_replica_that_dies_while_it_is_verified_holds_nothing_up(
    bench: Start, publish: str, order: tuple[type[HonestServer], type[HonestServer]]
) -> None:
    async with bench(publish, order[0], replicas=[order[1]]) as b:
        await b.train("t1", "t2")
        assert await b.live() == (1, 1, True)


async def test_an_adapter_that_one_replica_does_not_serve_does_not_count(bench: Start) -> None:
    async with bench("lora", replicas=[DeafServer]) as b:
        with pytest.raises(PublishError, match="does not serve the weights"):
            await b.train("t1", "t2")
        assert (await b.live())[0] == 0


@pytest.mark.parametrize("between", [UpstreamUnreachable, errors.UpstreamTimeout, NotSaved])
async def test_faults_of_a_vllm_that_was_away_between_them_are_not_added_up(
    bench: Start, monkeypatch: pytest.MonkeyPatch, between: type[LightningError]
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.publish.FAULTS", 3)
    async with bench("lora") as b:
        load, met = VllmServer.load_adapters, [VllmFault, VllmFault, between, VllmFault, VllmFault]

        async def faulty_at_first(*args: Any) -> None:
            if met:
                raise met.pop(0)("not now")
            await load(*args)

        monkeypatch.setattr(VllmServer, "load_adapters", faulty_at_first)
        with pytest.raises(VllmFault) if between is NotSaved else nullcontext():
            await b.train("t1", "t2")
        assert (await b.live())[1] == (None if between is NotSaved else 1)
        assert "publishing" not in {version.status for version in await b.store.versions.all()}


# Adapters of agents ---------------------------------------------------------------------------------------------------


NAMES = ("", "writer", "checker")


def adapter_files(version: PolicyVersion, name: str) -> Any:
    return load_file(Path(str(version.path)) / name / "adapter_model.safetensors")


async def test_a_version_holds_an_adapter_of_each_agent_and_a_step_moves_those_it_has_samples_of(bench: Start) -> None:
    async with bench("lora", policy=OWN_ADAPTERS) as b:
        await b.groups("t1", agent="rewriter")
        await b.groups("t2")  # of no name
        await b.train()
        live = await b.store.versions.live()
        assert (live.version, live.verified, live.served_model) == (1, True, "policy-v1")
        assert live.adapters == {"writer": "policy-v1.writer", "checker": "policy-v1.checker"}
        assert b.server.models == {"base", *live.served_models}
        moved = {name for name in NAMES for key, w in adapter_files(live, name).items() if "lora_B" in key and w.any()}
        assert moved == {"", "writer"}
        await require_seen_clearly(b.store, 1)
        await b.train("t3", "t4", agent="checker")
        second = await b.store.versions.live()
        both = {name: (adapter_files(live, name), adapter_files(second, name)) for name in NAMES}
        assert {n for n, (old, new) in both.items() if any((old[key] != new[key]).any() for key in old)} == {"checker"}


async def test_all_adapters_of_a_version_are_served_again_after_a_restart_and_go_with_it(bench: Start) -> None:
    unwatched = {"collapse": {"action": "off"}}  # no version to go back to stays
    async with bench("lora", policy=OWN_ADAPTERS | {"keep_versions": 3}, **unwatched) as b:
        await b.train("t1", "t2", agent="writer")
        for lost in (list((await b.store.versions.live()).served_models), ["policy-v1.checker"]):
            for name in lost:
                del b.server.adapters[name]
            await b.swap.restore(set())
            assert b.server.models == {"base", "policy-v1", "policy-v1.writer", "policy-v1.checker"}
        for tasks in (("t3", "t4"), ("t5", "t6"), ("t7", "t8")):
            await b.train(*tasks, agent="checker")
        served = {f"policy-v{v}{own}" for v in (2, 3, 4) for own in ("", ".writer", ".checker")}
        assert b.server.models == {"base", *served}
        assert (await b.store.versions.get(1)).path is None
        await b.store.rollouts.open([(RolloutName("r", "t"), "hash")], {}, policy_version=2)
        await b.train("t9", "t10", agent="checker")
        assert [v.version for v in await b.store.versions.with_files()] == [2, 3, 4, 5], "a running rollout needs 2"


async def test_a_proxy_of_another_mode_is_told_of_once(bench: Start, caplog: pytest.LogCaptureFixture) -> None:
    async with bench("merged") as b:
        await b.store.versions.decide_mode("lora", "proxy", configured=True)
        loop = b.loop()
        for tasks in (("t1", "t2"), ("t3", "t4")):
            await b.train(*tasks, loop=loop)
        assert caplog.text.count("policy.publish is merged for this trainer, and lora for the proxy") == 1


class MixedUpServer(HonestServer):
    """Serves the writer's weights to the checker, too."""

    def _open(self, path: str) -> Any:
        return super()._open(path.replace("checker", "writer"))


async def test_an_adapter_that_is_not_served_keeps_the_whole_version_from_going_live(bench: Start) -> None:
    async with bench("lora", MixedUpServer, policy=OWN_ADAPTERS) as b:
        with pytest.raises(PublishError, match=r"were published as policy-v1\.checker"):
            await b.train("t1", "t2", agent="checker")
        assert ((await b.live())[0], (await b.store.versions.get(1)).status) == (0, "failed")


@pytest.mark.parametrize("replicas", [(), (HonestServer,)])
@pytest.mark.parametrize(
    "publish, policy, restarts_at",
    [("merged", {}, "base"), ("lora", {}, "policy-v1"), ("lora", OWN_ADAPTERS, "policy-v1.checker")],
)
async def test_a_vllm_that_restarts_during_verification_gets_all_weights_again(
    bench: Start, replicas: Sequence[type[HonestServer]], publish: str, policy: dict[str, Any], restarts_at: str
) -> None:
    async with bench(publish, RestartingServer, replicas, policy=policy) as b:
        b.server.restarts_at = restarts_at
        await b.train("t1", "t2")
        live = await b.store.versions.live()
        assert (live.version, live.verified, b.server.restarts) == (1, True, 1)
        for server in (b.server, *b.replicas):
            assert server.models == {"base", *live.served_models}


async def test_an_adapter_that_ends_vllm_whenever_it_is_asked_is_not_published(bench: Start) -> None:
    async with bench("lora", RestartingServer) as b:
        b.server.always = True
        with pytest.raises(PublishError, match="vLLM restarted 3 times while policy version 1 was being verified"):
            await b.train("t1", "t2")
        assert ((await b.live())[0], b.server.restarts) == (0, 3 * b.config.policy.verify_samples)
        assert (await b.store.versions.get(1)).status == "failed"


async def test_a_server_that_fails_once_the_version_is_live_is_left_to_the_proxy(bench: Start) -> None:
    async with bench(replicas=[HonestServer]) as b:
        b.replicas[0].refuses["/collective_rpc"] = 500
        await b.train("t1", "t2")
        assert await b.live() == (1, 1, True) and len(await b.store.versions.all()) == 2
