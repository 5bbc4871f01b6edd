"""`doctor` on a whole system, and on one with each link broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.doctor.doctor import run_checks

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def outcomes(system: Any) -> tuple[int, dict[str, str]]:
    code, out, _ = await system.lightning("doctor", "--json")
    return code, {check["name"]: check["outcome"] for check in json.loads(out)}


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_whole_system_passes(running: Running, tmp_path: Path, publish: str) -> None:
    async with running(tmp_path, publish=publish) as system:
        assert (await outcomes(system))[1]["operator"] == "warning", "a web page could replace the weights"
        system.vllm.guarded = True
        code, found = await outcomes(system)
        assert set(found.values()) == {"ok"}
        wanted = {"configuration", "store", "proxy", "upstream policy", "context length", "tokens", "logprobs"}
        wanted |= {"shared directory"} if publish == "lora" else set()
        assert found.keys() == wanted | {"sampling", "template", "publishing", "operator", "alias", "rewards"}
        assert system.vllm.adapters == {}
        assert code == 0
        _, rollouts = await system.call("GET", "/rollouts")
        assert {(r["mode"], r["status"]) for r in rollouts["data"]} == {("eval", "discarded")}


@pytest.mark.parametrize(
    ("fault", "check", "outcome"),
    [
        ("processed_logprobs", "logprobs", "failed"),
        ("stable_template", "template", "warning"),
        ("returns_token_ids", "tokens", "failed"),
    ],
)
async def test_a_fault_of_the_policy_server_is_named(
    running: Running, tmp_path: Path, fault: str, check: str, outcome: str
) -> None:
    async with running(tmp_path) as system:
        setattr(system.vllm, fault, False)
        code, found = await outcomes(system)
        assert found[check] == outcome
        assert code == (1 if outcome == "failed" else 0)


async def test_a_server_that_does_not_see_the_directory_of_new_weights_is_named(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, publish="lora") as system:
        system.vllm.guarded, system.vllm.sees_files = True, False
        code, out, _ = await system.lightning("doctor", "--json")
        (check,) = [check for check in json.loads(out) if check["name"] == "shared directory"]
        assert (code, check["outcome"]) == (1, "failed")
        assert f"does not see {system.config.policy.directory.absolute()}" in check["found"]
        assert not list(system.config.policy.directory.glob("doctor-*"))


async def test_token_continuity_is_checked_where_it_is_wanted(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, continuity="exact") as system:
        assert (await outcomes(system))[1]["continuity"] == "ok"
        system.vllm.takes_tokens = False
        assert (await outcomes(system))[1]["continuity"] == "failed"
        system.vllm.renders = False
        code, out, _ = await system.lightning("doctor")
        assert code == 1
        assert "add --enable-scale-out" in " ".join(out.split())


async def test_it_tells_what_the_server_adds_to_requests_and_whether_grammars_are_known(
    running: Running, tmp_path: Path
) -> None:
    async def sampling() -> dict[str, Any]:
        checks = json.loads((await system.lightning("doctor", "--json"))[1])
        return next(check for check in checks if check["name"] == "sampling")

    async with running(tmp_path) as system:
        assert (await sampling())["found"] == "as requests say, without defaults of the server's own"
        system.vllm.defaults = {"temperature": 0.7, "top_k": 20, "top_p": 1.0}
        assert "defaults: temperature 0.7, top_k 20; the trainer" in (await sampling())["found"]
        system.vllm.renders = False
        assert (await sampling())["outcome"] == "warning"
        assert "--enable-scale-out" in (await sampling())["fix"]


async def test_rollouts_that_end_without_a_reward_are_noticed(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1", X_Task_Id="t")
        assert (await outcomes(system))[1]["rewards"] == "warning"
        await system.call("POST", "/rollouts/r1/end", {"status": "completed"})
        assert (await outcomes(system))[1]["rewards"] == "failed"
        await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 1})
        assert (await outcomes(system))[1]["rewards"] == "ok"


async def test_what_is_down_is_named_with_its_fix(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    upstreams = '[{name: policy, base_url: "http://127.0.0.1:9/v1"}]'
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/s.db'}}\nupstreams: {upstreams}\n")
    found = {check.name: check for check in await run_checks(path)}
    assert {name: check.outcome for name, check in found.items()} == {
        "configuration": "ok",
        "store": "ok",
        "proxy": "failed",
        "upstream policy": "failed",
    }
    assert "lightning-proxy serve" in (found["proxy"].fix or "")
    assert "lightning-proxy vllm" in (found["upstream policy"].fix or "")


async def test_a_wrong_key_is_a_failed_check(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("proxy: {prot: 1}\n")
    (only,) = await run_checks(path)
    assert (only.outcome, only.found) == ("failed", f"{path}: proxy.prot: unknown key")


async def test_a_store_that_cannot_be_opened_is_a_failed_check(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    (tmp_path / "file").write_text("")
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/file/s.db'}}\n")
    assert {c.name: c.outcome for c in await run_checks(path)}["store"] == "failed"
