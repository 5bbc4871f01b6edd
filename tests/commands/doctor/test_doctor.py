"""`doctor` on a whole system, and on one with each link broken."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.commands.doctor.doctor import run_checks
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.types import Reward, RolloutName
from lightning_proxy.trainer.alone import only_trainer
from support.command_line import lightning

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
        wanted |= {"sampling", "template", "tools", "publishing", "operator", "alias", "rewards", "trainer"}
        wanted |= {"shared directory"} if publish == "lora" else set()
        assert found.keys() == wanted | {"next step"}
        assert system.vllm.adapters == {}
        assert code == 0
        assert (await system.call("GET", "/rollouts"))[1]["data"] == []


async def test_what_an_agents_key_cannot_delete_is_told(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_API_KEY", "agent")
    async with running(tmp_path, api_keys=["agent"], admin_keys=["admin"]) as system:
        code, out, _ = await system.lightning("doctor", "--json")
        alias = next(check for check in json.loads(out) if check["name"] == "alias")
        assert (code, alias["outcome"]) == (0, "ok")
        assert "stays: only an admin's key deletes it" in alias["found"]


async def test_it_says_whether_a_trainer_runs_and_what_a_step_needs(running: Running, tmp_path: Path) -> None:
    async def checks() -> dict[str, Any]:
        return {check["name"]: check for check in json.loads((await system.lightning("doctor", "--json"))[1])}

    async with running(tmp_path) as system, system.store() as store:
        size, wanted = system.config.trainer.group_size, system.config.trainer.tasks_per_step
        for task in range(wanted):
            names = [f"r{task}-{i}" for i in range(size)]
            await store.rollouts.open([(RolloutName(name, f"t{task}"), f"hash of {name}") for name in names], {})
            ended = [name for name in names if name != "r0-0"]
            await store.rewards.post([Reward(name, 0.5) for name in ended])
            for name in ended:
                await system.chat(name)
        found = await checks()
        assert found["trainer"]["outcome"] == "ok"
        assert found["next step"]["found"].endswith("; 1 more has begun, 1 rollout short")
        await store.rewards.post([Reward("r0-0", 0.5)])
        found = await checks()
        assert (found["trainer"]["outcome"], found["trainer"]["found"]) == (
            "warning", "none runs, and a step could be made"
        )  # fmt: skip
        assert found["next step"]["found"].endswith("it can be made")
        with only_trainer(tmp_path / "policy", system.config.store.path):
            assert (await checks())["trainer"]["found"] == "one runs on this store"


async def test_tools_that_a_server_does_not_parse_are_told(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.parses_tools = False
        code, out, _ = await system.lightning("doctor")
        assert code == 0
        assert "a request with tools gets HTTP 400" in " ".join(out.split())
        assert "--tool-call-parser NAME" in " ".join(out.split())


async def test_looking_makes_no_store(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/new/s.db'}}\n")
    found = {check.name: check for check in await run_checks(path)}
    assert (found["store"].outcome, "not there yet" in found["store"].found) == ("ok", True)
    assert lightning("--config", path, "keys", "list").returncode == 0
    assert lightning("--config", path, "keys", "purge").returncode == 0
    assert lightning("--config", path, "keys", "revoke", "nobody").returncode == 1
    assert [one.name for one in tmp_path.iterdir()] == ["config.yaml"]


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
    fix = found["upstream policy"].fix or ""
    assert fix.startswith("vllm.port is 8100, but the upstream policy is at port 9: set both, as in vllm: {port: 8100}")
    path.write_text(f"{path.read_text()}vllm: {{port: 9}}\n")
    fix = {check.name: check for check in await run_checks(path)}["upstream policy"].fix or ""
    assert fix.startswith("start it with `lightning-proxy vllm`; if it is starting, wait until it prints")


async def test_where_nothing_was_ever_started_it_asks_whether_the_system_runs_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/s.db'}}\n")
    proxy = {check.name: check for check in await run_checks(path)}["proxy"]
    assert "if it runs already, run doctor where it was started" in (proxy.fix or "")


async def test_a_system_that_runs_by_another_configuration_is_named_and_no_part_of_it_blamed(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system:
        port = system.url.rpartition(":")[2]
        path = tmp_path / "other.yaml"
        path.write_text(f"proxy: {{port: {port}}}\nstore: {{url: 'sqlite:///{tmp_path}/elsewhere/s.db'}}\n")
        found = {check.name: check for check in await run_checks(path)}
    assert {name: check.outcome for name, check in found.items() if check.outcome != "ok"} == {"proxy": "failed"}
    assert found["proxy"].found == (
        f"{system.url} answers, but its store is not this configuration's: there is no {tmp_path}/elsewhere/s.db"
    )
    assert (found["proxy"].fix or "").startswith("run doctor where it was started")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_vllm_with_another_operators_key_is_no_broken_vllm(
    running: Running, tmp_path: Path, publish: str
) -> None:
    async with running(tmp_path, publish=publish) as system:
        system.vllm.closed = True
        code, out, _ = await system.lightning("doctor", "--json")
        check = next(check for check in json.loads(out) if check["name"] == "publishing")
        assert (code, check["outcome"]) == (1, "failed")
        assert f"does not know the key in {system.config.policy.directory.absolute()}/operator.key" in check["found"]
        assert "where vLLM was started" in check["fix"]


@pytest.mark.parametrize("kind", ["openai", "anthropic", "litellm"])
async def test_a_key_that_is_checked_on_calls_alone_is_tried_by_one_small_call(tmp_path: Path, kind: str) -> None:
    asked: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key")
        if request.method == "GET":
            return web.json_response({"data": [{"id": "theirs"}]})
        asked.append((request.path, await request.json()))
        if given != "the-right-key":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
        return web.json_response({"id": "x", "object": "chat.completion", "model": "theirs", "choices": [choice]})

    app = web.Application()
    app.router.add_route("*", "/v1/{rest:.*}", answer)
    path, outcomes = tmp_path / "config.yaml", []
    async with TestServer(app) as server:
        for key in ("the-wrong-key", "the-right-key"):
            upstream = {"name": "p", "kind": kind, "base_url": str(server.make_url("/v1")), "api_key": key}
            if kind == "anthropic":
                upstream |= {"kind": "openai", "api_key_header": "x-api-key"}
            if kind == "litellm":
                upstream["models"] = ["openai/theirs"]
            config = {"proxy": {"port": 9}, "store": {"url": f"sqlite:///{tmp_path}/s.db"}, "upstreams": [upstream]}
            path.write_text(json.dumps(config))
            found = [check for check in await run_checks(path) if check.name == "upstream p"][-1]
            assert key not in found.found
            outcomes.append(found.outcome)
    assert outcomes == ["failed", "ok"]
    wanted = "/v1/messages" if kind == "anthropic" else "/v1/chat/completions"
    assert [(path, body["model"], body["max_tokens"]) for path, body in asked] == [(wanted, "theirs", 1)] * 2


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_full_disk_is_a_failed_check(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/s.db'}}\n")
    if is_there:
        async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")):
            pass
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # as if there was no room for more
    try:
        store = {check.name: check for check in await run_checks(path)}["store"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (store.outcome, "full" in store.found) == ("failed", True), store


async def test_a_wrong_key_is_a_failed_check(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("proxy: {prot: 1}\n")
    (only,) = await run_checks(path)
    assert (only.outcome, only.found) == ("failed", f"{path}: proxy.prot: unknown key; did you mean port?")


async def test_a_store_that_cannot_be_opened_is_a_failed_check(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    (tmp_path / "file").write_text("")
    path.write_text(f"proxy: {{port: 9}}\nstore: {{url: 'sqlite:///{tmp_path}/file/s.db'}}\n")
    assert {c.name: c.outcome for c in await run_checks(path)}["store"] == "failed"
