"""What a red team did to a real `serve`, one test a point; `-s` prints the figures of docs/security.md.

The vLLM that `up` starts is attacked in tests/end_to_end/test_operator_routes.py, and how long a large request keeps
others waiting: docs/results.md.
"""

from __future__ import annotations

import asyncio
import json
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from support.served import Proxy, proxy_in_front

KEY, MB = "sk-red-team", 1_000_000
Ask = Callable[..., Awaitable[tuple[int, Any]]]


@pytest.fixture
def with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PROXY__API_KEYS", json.dumps([KEY]))


@asynccontextmanager
async def attacked(directory: Path) -> AsyncIterator[tuple[Proxy, Ask]]:
    """A running proxy, and what asks it: method, path, body, key."""
    async with proxy_in_front(directory) as proxy, aiohttp.ClientSession() as session:
        await proxy.start()

        async def ask(method: str, path: str, body: Any = None, key: str = KEY, **headers: str) -> tuple[int, Any]:
            headers |= {"Authorization": f"Bearer {key}"}
            async with session.request(method, proxy.url + path, json=body, headers=headers) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

        yield proxy, ask


def memory(proxy: Proxy) -> float:
    """In MB."""
    assert proxy.process is not None
    return float(psutil.Process(proxy.process.pid).memory_info().rss / MB)


@pytest.mark.usefixtures("with_a_key")
async def test_connections_without_a_key_hold_no_memory(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (proxy, _):
        before, writers = memory(proxy), []
        for _ in range(25):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"POST /rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (31 * MB))
            writer.write(b"{" + b" " * (30 * MB))
            writers.append((reader, writer))
        statuses = [await asyncio.wait_for(reader.readline(), 30) for reader, _ in writers]
        held = memory(proxy) - before
        for _, writer in writers:
            writer.close()
    print(f"25 connections without a key, 30 MB each: {held:.0f} MB held")
    assert {status.split()[1] for status in statuses} == {b"401"}
    assert held < 100


@pytest.mark.usefixtures("with_a_key")
async def test_a_small_request_writes_no_large_store(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (_, ask):
        status, _ = await ask("POST", "/rollouts", {"n": 1000, "metadata": {"a": "x" * MB}})
        size = sum(file.stat().st_size for file in tmp_path.glob("store.db*")) / MB
        rewards = [{"rollout_id": "r", "reward": 1.0}] * 10_001
        many, _ = await ask("POST", "/reward", rewards)
    print(f"1,000 rollouts with 1 MB of metadata: {status}, {size:.1f} MB in the store; 10,001 rewards: {many}")
    assert (status, many) == (413, 413) and size < 10


@pytest.mark.usefixtures("with_a_key")
async def test_code_that_the_policy_runs_cannot_use_its_rollouts_key_for_more(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (_, ask):
        _, ((first, second)) = await ask("POST", "/rollouts", {"n": 2, "task_id": "t"})
        key, own, chat = first["api_key"], f"/rollouts/{first['rollout_id']}", {"model": "policy", "messages": []}
        found = {
            "call": await ask("POST", "/v1/chat/completions", chat, key),
            "see its sibling": await ask("GET", f"/rollouts/{second['rollout_id']}", None, key),
            "change its mode": await ask("POST", "/v1/chat/completions", chat, key, **{"X-Rollout-Mode": "eval"}),
            "change its task": await ask("POST", "/v1/chat/completions", chat, key, **{"X-Task-Id": "other"}),
            "offer siblings again": await ask(
                "POST", "/reward", {"rollout_id": first["rollout_id"], "reward": 1e4, "retrain": True}, key
            ),
            "reward itself": await ask("POST", "/reward", {"rollout_id": first["rollout_id"], "reward": 1}, key),
        }
        await asyncio.sleep(2.5)  # until every worker knows that it ended
        found["call after its end"] = await ask("POST", f"{own}/v1/chat/completions", chat, key)
        found["reward late"] = await ask("POST", "/reward", {"rollout_id": first["rollout_id"], "reward": 0}, key)
        _, [only] = await ask("POST", "/rollouts", {"may_reward": False})
        found["reward with may_reward: false"] = await ask(
            "POST", "/reward", {"rollout_id": only["rollout_id"], "reward": 1}, only["api_key"]
        )
    statuses = {what: status for what, (status, _) in found.items()}
    print(f"with a rollout's key: {statuses}")
    assert [what for what, status in statuses.items() if status == 200] == ["call", "reward itself", "reward late"]
    assert {status for status in statuses.values() if status != 200} == {403}
    assert found["call after its end"][1]["error"]["code"] == "rollout_ended"


async def test_two_trainers_on_one_store_are_one_too_many(tmp_path: Path) -> None:
    from lightning_proxy.core.errors import ConfigError
    from lightning_proxy.trainer.lock import only_trainer

    one, two = (only_trainer(tmp_path / name, tmp_path / "store.db") for name in ("one", "two"))
    with one, pytest.raises(ConfigError, match="another trainer works on"), two:
        pass


async def test_what_is_written_is_its_owners_alone(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (_, ask):
        await ask("POST", "/rollouts/r/v1/chat/completions", {"model": "policy", "messages": []})
        written = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "config.yaml"]
    assert written and [file for file in written if stat.S_IMODE(file.stat().st_mode) & 0o077] == []


async def test_a_store_that_is_gone_is_not_ready(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (proxy, ask):
        ready = (await ask("GET", "/readyz"))[0]
        proxy.store.unlink()
        gone, said = await ask("GET", "/readyz")
    print(f"/readyz: {ready}, and {gone} once the store's file was removed: {said['store']}")
    assert (ready, gone) == (200, 503)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_killed_proxy_gives_its_port_back(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_PROXY__WORKERS", str(workers))
    async with attacked(tmp_path) as (proxy, ask):
        await proxy.end(signal.SIGKILL)
        await proxy.start()
        await asyncio.sleep(15)  # by now the workers of the killed one are gone
        assert proxy.process is not None and proxy.process.returncode is None
        assert (await ask("GET", "/healthz"))[0] == 200
