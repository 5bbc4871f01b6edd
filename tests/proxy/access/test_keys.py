"""Keys as the command line makes and revokes them, and what a running proxy does with them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_proxy.commands.run.runner import LocalRunner
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import Conflict, NotFound
from lightning_proxy.core.records import Limits
from lightning_proxy.store.keys import Keyring
from lightning_proxy.store.opening import opened
from support.command_line import lightning

Running = Callable[..., AbstractAsyncContextManager[Any]]
NOTICED_S = 5.0  # it takes half a second; the machine may be busy


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def create(system: Any, name: str, **more: Any) -> str:
    """A key made by another process than the proxy's."""
    async with opened(system.config.store) as database:
        role, recording = more.pop("role", "agent"), more.pop("recording", True)
        return (await Keyring(database).create(name, role, Limits(**more), recording=recording))[0]


async def noticed(system: Any, key: str) -> bool:
    """Whether the proxy lets this key in, and nobody without one, sooner or later."""
    return await becomes(system, 401) and await becomes(system, 200, **bearer(key))


async def revoke(system: Any, name: str) -> None:
    async with opened(system.config.store) as database:
        await Keyring(database).revoke(name)


async def becomes(system: Any, status: int, path: str = "/policy", method: str = "GET", **headers: str) -> bool:
    """Whether a request gets this status, sooner or later."""
    deadline = time.monotonic() + NOTICED_S
    while (await system.call(method, path, **headers))[0] != status:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def test_keys_of_configuration_and_store_count_side_by_side(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["configured"]) as system:
        key = await create(system, "stored")
        assert await noticed(system, key)
        assert (await system.chat("r1", **bearer("configured")))[0] == 200
        await revoke(system, "stored")
        assert await becomes(system, 401, **bearer(key))
        assert (await system.chat("r1", **bearer("configured")))[0] == 200


async def test_once_there_was_an_admins_key_agents_are_no_admins(running: Running, tmp_path: Path) -> None:
    body = json.dumps({"version": 0}).encode()

    async def promotes(key: str) -> int:
        return (await system.call("POST", "/policy/promote", body, **bearer(key)))[0]

    async with running(tmp_path) as system:
        agent = await create(system, "agent")
        assert await noticed(system, agent)
        assert await promotes(agent) == 200
        admin = await create(system, "ops", role="admin")
        assert await noticed(system, admin)
        assert (await promotes(agent), await promotes(admin)) == (401, 200)
        assert (await system.chat("r1", **bearer(admin)))[0] == 200
        await revoke(system, "ops")
        assert await becomes(system, 401, **bearer(admin))
        assert await promotes(agent) == 401


async def test_changes_are_logged_with_the_key_that_made_them_and_never_the_key_itself(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_proxy.audit")
    async with running(tmp_path, admin_keys=["in-the-file"], api_keys=["agents"]) as system:
        secret = await create(system, "ops", role="admin")
        assert await noticed(system, secret)
        await system.chat("r1", **bearer("agents"))
        for value in (0.0, 1.0):
            reward = {"rollout_id": "r1", "reward": value}
            assert (await system.call("POST", "/reward", reward, **bearer(secret)))[0] == 200
        assert (await system.call("DELETE", "/rollouts/r1", **bearer(secret)))[0] == 204
        assert (await system.call("POST", "/policy/promote", {"version": 0}, **bearer("in-the-file")))[0] == 200
        await revoke(system, "ops")
        assert await becomes(system, 401, **bearer(secret))
        async with opened(system.config.store) as database:
            (ops,) = await Keyring(database).all()
            await Keyring(database).purge()
        while "purged" not in caplog.text:
            await asyncio.sleep(0.05)
    told, key = [record.getMessage() for record in caplog.records], f"key ops (id {ops.key_id})"
    assert [line for line in told if line.startswith("key ")] == [
        f"{key} was created (admin, scope all)", f"{key} was revoked", f"{key} was purged",
    ]  # fmt: skip
    for change in (
        f"the reward of rollout r1 was changed, by {key}",
        f"rollout r1 was deleted, by {key}",
        "version 0 was promoted, by key proxy.admin_keys[0]",
    ):
        assert told.count(change) == 1, told
    assert not any(word in line for line in told for word in (secret, "in-the-file"))


async def test_a_revoked_key_ends_the_rollouts_keys_that_it_asked_for(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        key, other = await create(system, "a"), await create(system, "b")
        assert await noticed(system, other)
        _, (mine,) = await system.call("POST", "/rollouts", {}, **bearer(key))
        _, (theirs,) = await system.call("POST", "/rollouts", {}, **bearer(other))
        for opened_rollout in (mine, theirs):
            assert (await system.chat(opened_rollout["rollout_id"], **bearer(opened_rollout["api_key"])))[0] == 200
        await revoke(system, "a")
        assert await becomes(system, 401, **bearer(key))
        assert (await system.chat(mine["rollout_id"], **bearer(mine["api_key"])))[0] == 401
        assert (await system.chat(theirs["rollout_id"], **bearer(theirs["api_key"])))[0] == 200


async def test_the_host_rule_counts_stored_keys(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        assert (await system.call("GET", "/policy", Host="evil.example"))[0] == 403
        key = await create(system, "ci")
        assert await becomes(system, 200, Host="proxy.example", **bearer(key))
        assert (await system.call("GET", "/policy", Host="proxy.example"))[0] == 401


async def test_another_host_is_closed_even_while_there_is_no_key(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, host="0.0.0.0") as system:
        assert (await system.chat("r1"))[0] == 401
        assert (await system.call("POST", "/policy/rollback"))[0] == 401
        key = await create(system, "ci")
        assert await noticed(system, key)


def test_with_a_key_other_machines_are_served(tmp_path: Path) -> None:
    serve = partial(lightning, cwd=tmp_path)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "config.yaml").write_text(f"proxy: {{host: 0.0.0.0, port: {port}}}\n")
        assert serve("keys", "create", "ci").returncode == 0
        assert "proxy.port" in serve("serve").stderr, "the key is enough: now it is the port that cannot be had"
    assert serve("keys", "create", "many", "--concurrent", str(2**64)).returncode == 2
    (tmp_path / "lightning.db").write_bytes(b"no database, but as long as the head of one" * 100)
    for command in (["serve"], ["keys", "list"]):
        done = serve(*command)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "lightning.db cannot be opened" in done.stderr


async def test_names_are_unique_among_the_keys_that_let_somebody_in(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")) as database:
        ring = Keyring(database)
        first, _ = await ring.create("ci", "agent", Limits(), recording=True)
        with pytest.raises(Conflict, match="'ci'"):
            await ring.create("ci", "admin", Limits(), recording=True)
        await ring.revoke("ci")
        with pytest.raises(NotFound, match="'ci'"):
            await ring.revoke("ci")
        second, _ = await ring.create("ci", "agent", Limits(), recording=True)
        assert first != second
        assert [key.live for key in await ring.all()] == [False, True]
        assert (await ring.purge(), len(await ring.all())) == (1, 1)


async def test_a_key_over_its_limit_gets_429_in_the_shape_of_openais_api(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        key, other = await create(system, "a", requests_per_minute=3), await create(system, "b")
        assert await noticed(system, other)
        _, (opened_rollout,) = await system.call("POST", "/rollouts", {}, **bearer(key))
        assert (await system.chat(opened_rollout["rollout_id"], **bearer(opened_rollout["api_key"])))[0] == 200
        assert (await system.chat("r1", **bearer(key)))[0] == 200
        assert (await system.chat("r1", **bearer(other)))[0] == 200
        async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
        assert refused.value.code == "rate_limit_exceeded"
        headers = refused.value.response.headers
        assert 1 <= int(headers["retry-after"]) <= 20
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "0")
        assert len((await system.call("GET", "/rollouts/r1", **bearer(other)))[1]["calls"]) == 2


async def test_tokens_and_requests_at_once_are_limited_by_default_limits_too(running: Running, tmp_path: Path) -> None:
    limits = {"tokens_per_minute": 3, "concurrent": 1}
    async with running(tmp_path, limits=limits) as system:
        system.vllm.delays.append(0.5)
        first = asyncio.create_task(system.chat("r1"))
        while not system.vllm.headers:
            await asyncio.sleep(0.01)
        status, body = await system.chat("r1")
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await first)[0] == 200  # of 5 tokens
        status, body = await system.chat("r1")
        assert (status, "3 tokens a minute" in body["error"]["message"]) == (429, True)


async def chat_unrecorded(system: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    body = {"model": "policy", "messages": [{"role": "user", "content": "between us"}]}
    async with system.session.post(f"{system.url}/v1/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json(), {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.sqlite
async def test_a_call_with_recording_off_leaves_nothing_behind(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        key = await create(system, "silent", recording=False)
        assert await noticed(system, key)
        off = await create(system, "ci")
        assert await noticed(system, off)
        for headers in (bearer(key), bearer(off) | {"X-Recording": "off"}, bearer(key) | {"X-Recording": "on"}):
            status, body, got = await chat_unrecorded(system, **headers)
            assert (status, body["choices"][0]["message"]["content"][:7]) == (200, "by base")
            assert body["choices"][0]["token_ids"] is None, "what the proxy asked for is taken out"
            assert not {"x-call-id", "x-rollout-id"} & got.keys()
        assert not any("x-recording" in {name.lower() for name in seen} for seen in system.vllm.headers)
        assert (await system.call("GET", "/rollouts", **bearer(off)))[1]["data"] == []
        async with system.session.get(f"{system.url}/metrics") as answer:
            assert 'lightning_unrecorded_calls_total{status="ok"} 3.0' in await answer.text()
        status, body, _ = await chat_unrecorded(system, **bearer(off), **{"X-Recording": "maybe"})
        assert (status, body["error"]["param"]) == (400, "X-Recording")
        assert (await chat_unrecorded(system, **bearer(off)))[2]["x-call-id"]
    assert b"between us" in b"".join(path.read_bytes() for path in tmp_path.glob("store.db*"))


async def test_agent_programs_do_not_inherit_our_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("LIGHTNING_API_KEY", "LIGHTNING_PROXY__ADMIN_KEYS", "LIGHTNING_UPSTREAMS", "LIGHTNING_STORE__URL")
    for name in ours:
        monkeypatch.setenv(name, "our-secret")
    monkeypatch.setenv("LIGHTNING_NOTE", "theirs")
    runner = LocalRunner(["env"])
    assert await runner.run({"OPENAI_API_KEY": "of-the-rollout"}, tmp_path / "log") == 0
    await runner.close()
    env = (tmp_path / "log").read_text()
    assert "our-secret" not in env and "OPENAI_API_KEY=of-the-rollout" in env and "LIGHTNING_NOTE=theirs" in env
