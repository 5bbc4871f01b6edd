"""The control API over HTTP, with a real store; vLLM's operator routes are played by `PolicyServer`."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_a_body_that_does_not_say_that_it_is_json_is_told_so(running: Running, tmp_path: Path) -> None:
    """As `curl -d` sends it without a header."""
    async with running(tmp_path) as system:
        body, form = b'{"rollout_id": "r1", "reward": 1}', "application/x-www-form-urlencoded"
        for path in ("/reward", "/rollouts", "/rollouts/r1/end", "/rollouts/r1/events", "/policy/promote"):
            status, answer = await system.call("POST", path, body, Content_Type=form)
            assert status == 422
            assert answer["error"]["message"] == (
                f"the body needs the header Content-Type: application/json; this one is called {form}"
            )
            status, answer = await system.call("POST", path)
            assert (status, answer["error"]["message"]) == (422, "a JSON body is needed")
        for path, body in (("/reward", b"5"), ("/rollouts/r1/events", b'{"kind": "song"}')):
            status, answer = await system.call("POST", path, body)
            assert (status, answer["error"]["message"][:6]) == (422, "Input ")


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


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_a_rollouts_key_counts_wherever_clients_put_it(running: Running, tmp_path: Path, header: str) -> None:
    async with running(tmp_path, api_keys=["secret"]) as system:
        _, (opened,) = await system.call("POST", "/rollouts", {}, Authorization="Bearer secret")
        key = opened["api_key"]
        body = {"model": "policy", "messages": []}
        value = f"Bearer {key}" if header == "authorization" else key
        assert (await system.call("POST", "/v1/chat/completions", body, **{header: value}))[0] == 200
        _, rollout = await system.call("GET", f"/rollouts/{opened['rollout_id']}", Authorization="Bearer secret")
        assert len(rollout["calls"]) == 1
        seen = system.vllm.headers[-1]
        assert key not in str(seen) and "secret" not in str(seen)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "[::1]:8080", "Origin": "http://127.0.0.1:3000"}, 200),
        ({"Origin": "vscode-file://vscode-app"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "http://["}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_without_keys_no_web_page_is_served(
    running: Running, tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with running(tmp_path) as system:
        for method, path, body in (
            ("GET", "/rollouts", None),
            ("POST", "/v1/chat/completions", {"model": "policy", "messages": []}),
        ):
            got, answer = await system.call(method, path, body, **headers)
            assert (got, "error" in answer) == (status, status != 200)
    async with running(tmp_path, api_keys=["secret"]) as system:
        got, _ = await system.call("GET", "/rollouts", Authorization="Bearer secret", **headers)
        assert got == 200


async def test_readiness_metrics_and_unknown_routes(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
        assert await system.call("GET", "/readyz") == (200, {"status": "ready", "store": "ok", "upstream": "ok"})
        async with system.session.get(system.url + "/metrics") as answer:
            text = await answer.text()
        assert 'lightning_calls_total{status="ok"} 1.0' in text
        assert 'lightning_rollouts{mode="train",status="running"} 1.0' in text
        status, answer = await system.call("GET", "/nowhere")
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        assert (await system.call("GET", "/openapi.json"))[0] == 200


async def test_the_document_says_which_key_a_route_needs(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        _, document = await system.call("GET", "/openapi.json")
    assert {*document["components"]["securitySchemes"]} == {"key", "key in a header", "admin key"}
    needed = {
        f"{method.upper()} {path}": [name for one in route.get("security", []) for name in one]
        for path, item in document["paths"].items()
        for method, route in item.items()
    }
    assert {route for route, names in needed.items() if names == ["admin key"]} == {
        "DELETE /rollouts/{rollout_id}", "POST /policy/promote", "POST /policy/rollback", "POST /prompts",
        "POST /prompts/{name}/promote", "POST /prompts/{name}/rollback", "POST /prompts/{name}/test",
    }  # fmt: skip
    assert {route for route, names in needed.items() if not names} == {"GET /healthz", "GET /readyz", "GET /metrics"}
    assert needed["POST /reward"] == ["key", "key in a header"]
    assert {} in document["paths"]["/reward"]["post"]["security"]  # while there is no key


@pytest.mark.sqlite
async def test_a_store_that_is_larger_than_it_is_to_be_is_degraded(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, store={"retention": {"max_gib": 1e-6}}) as system:
        await system.chat("runs")
        status, ready = await system.call("GET", "/readyz")
        assert (status, ready["status"], ready["store"]) == (200, "degraded", "ok")
        assert "more than store.retention.max_gib" in ready["retention"]
        shown = await system.lightning("status")
        assert "degraded" in shown.stdout and "store.retention.max_gib" in shown.stdout


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


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.sqlite
async def test_a_store_that_lost_its_name_is_not_ready(running: Running, tmp_path: Path, how: str) -> None:
    """What is written to it is found by nobody."""
    async with running(tmp_path) as system:
        assert (await system.call("GET", "/readyz"))[0] == 200
        (tmp_path / "store.db").rename(tmp_path / "away.db")
        if how == "replaced":
            (tmp_path / "store.db").write_bytes((tmp_path / "away.db").read_bytes())
        status, answer = await system.call("GET", "/readyz")
    assert (status, answer["status"]) == (503, "not ready")
    assert "store.db was removed or replaced" in answer["store"]


@pytest.mark.sqlite
async def test_a_damaged_store_is_a_503_at_every_door(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        for i in range(30):
            await system.chat(f"r{i}")
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with (tmp_path / "store.db").open("r+b") as file:
            for page in range(1, file.seek(0, 2) // 4096):
                file.seek(page * 4096)
                file.write(b"\x99" * 200)
        for method, path, body in (
            ("GET", "/rollouts", None),
            ("GET", "/rollouts/r1", None),
            ("POST", "/reward", {"rollout_id": "r1", "reward": 1}),
            ("POST", "/v1/chat/completions", {"model": "policy", "messages": []}),
            ("GET", "/readyz", None),
        ):
            status, answer = await system.call(method, path, body)
            assert (status, "malformed" in str(answer)) == (503, True), (path, answer)


async def test_a_body_over_the_limit_is_refused(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, max_body_mb=0.01) as system:
        status, answer = await system.call(
            "POST", "/reward", {"rollout_id": "r1", "reward": 1, "comment": "x" * 20_000}
        )
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


async def test_a_method_that_a_path_does_not_have_is_answered_with_those_that_it_has(running, tmp_path):
    async with (
        running(tmp_path) as system,
        system.session.put(system.url + "/rollouts") as answer,
    ):
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, POST")


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
