"""Publishing several adapters: a version is one adapter for each agent that has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_proxy.core.errors import PublishError
from lightning_proxy.core.records import PolicyVersion
from lightning_proxy.serving.swap import Swap
from support.training import OWN_ADAPTERS, HonestServer, RestartingServer, bench, require_seen_clearly


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
        await require_seen_clearly(b.store, 1)
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
