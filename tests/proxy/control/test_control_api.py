"""The control API over HTTP, with a real store; vLLM's operator routes are played by `PolicyServer`."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_merged_weights_are_promoted_rolled_back_and_named_on_calls(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        version = await system.earlier_version(store, tmp_path)
        assert (await system.call("POST", "/policy/promote", {"version": version}))[1]["live"] is True
        _, answer = await system.chat("r1")
        assert answer["choices"][0]["message"]["content"] == "by base with v1"
        assert (await system.call("GET", "/rollouts/r1"))[1]["calls"][0]["policy_version"] == 1
        assert (await system.call("POST", "/policy/rollback"))[1]["version"] == 0
        assert system.vllm.weights == str(tmp_path)
        assert (await system.call("POST", "/policy/rollback"))[0] == 409
        assert (await system.call("POST", "/policy/promote", {"version": 9}))[0] == 404


async def test_rollouts_keep_the_adapter_they_began_with(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, publish="lora") as system, system.store() as store:
        await system.chat("old")
        version = await system.earlier_version(store, tmp_path)
        await system.call("POST", "/policy/promote", {"version": version})
        _, again = await system.chat("old")
        _, fresh = await system.chat("new")
        assert again["choices"][0]["message"]["content"].startswith("by base ")
        assert fresh["choices"][0]["message"]["content"].startswith("by policy-v1 ")
        _, rollout = await system.call("GET", "/rollouts/new")
        assert rollout["calls"][0]["policy_version"] == 1


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_restarted_vllm_serves_the_live_version_again(running: Running, tmp_path: Path, publish: str) -> None:
    async with running(tmp_path, publish=publish) as system, system.store() as store:
        version = await system.earlier_version(store, tmp_path)
        await system.call("POST", "/policy/promote", {"version": version})
        system.vllm.restart()
        for _ in range(100):
            _, answer = await system.chat("after")
            content = answer.get("choices", [{"message": {"content": ""}}])[0]["message"]["content"]
            if content in ("by base with v1", f"by policy-v1 with {tmp_path.name}"):
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail(f"the restarted server still answers {content!r}")


async def test_a_server_left_paused_is_resumed(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.paused = True
        for _ in range(100):
            if not system.vllm.paused:
                break
            await asyncio.sleep(0.1)
        assert not system.vllm.paused


async def test_a_call_names_every_version_that_was_live_while_it_ran(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        versions = [await system.earlier_version(store, tmp_path) for _ in range(2)]
        system.vllm.delays = [1.0]
        call = asyncio.create_task(system.chat("r1"))
        await asyncio.sleep(0.2)
        for version in versions:
            assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
        await call
        _, rollout = await system.call("GET", "/rollouts/r1")
        assert rollout["calls"][0]["policy_versions"] == [0, *versions]
        system.vllm.delays = [1.0]
        call = asyncio.create_task(system.chat("r2"))
        await asyncio.sleep(0.2)
        for version in (0, versions[-1]):  # there and back
            assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
        await call
        _, rollout = await system.call("GET", "/rollouts/r2")
        assert rollout["calls"][0]["policy_versions"] == [versions[-1], 0]


async def test_a_vllm_that_stays_away_is_told_of_once(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(dict[str, str]):
        asked = 0

        def items(self) -> Any:
            Broken.asked += 1
            raise OSError("broken")

    monkeypatch.setattr("lightning_proxy.proxy.policy.watch.WATCH_S", 0.01)
    async with running(tmp_path) as system:
        system.vllm.adapters = Broken()
        while Broken.asked < 5:
            await asyncio.sleep(0.01)
        records = [record for record in caplog.records if record.name == "lightning_proxy.proxy.policy.watch"]
        told = [record.getMessage() for record in records]
    assert len(told) == 1, told


async def test_a_body_over_the_limit_is_refused(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, max_body_mb=0.01) as system:
        status, answer = await system.call(
            "POST", "/reward", {"rollout_id": "r1", "reward": 1, "comment": "x" * 20_000}
        )
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


async def test_a_version_whose_files_are_gone_is_not_promoted(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        version = await system.earlier_version(store, tmp_path)
        (tmp_path / f"v{version}").rmdir()
        status, answer = await system.call("POST", "/policy/promote", {"version": version})
        assert status == 404 and "the files of policy version 1 are gone" in answer["error"]["message"]
        code, _, err = await system.lightning("policy", "promote", str(version))
        assert (code, err.count("\n")) == (1, 1) and "are gone" in err
        assert (await system.call("GET", "/policy"))[1]["live_version"] == 0
        assert (await system.chat("r1"))[0] == 200


async def test_an_adapter_that_vllm_refuses_is_not_promoted(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, publish="lora") as system, system.store() as store:
        version = await system.earlier_version(store, tmp_path)
        system.vllm.refuses = "/v1/load_lora_adapter"
        status, answer = await system.call("POST", "/policy/promote", {"version": version})
        assert status == 502 and "LoRA rank 64 is greater than max_lora_rank 16" in answer["error"]["message"]
        code, _, err = await system.lightning("policy", "promote", str(version))
        assert (code, err.count("\n")) == (1, 1) and "LoRA rank 64" in err
        assert (await system.call("GET", "/policy"))[1]["live_version"] == 0
        assert (await system.chat("r1"))[0] == 200
