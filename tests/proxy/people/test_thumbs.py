"""A key for one value of one call: what it may do, and how it ends. A real proxy and store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.people import table
from lightning_proxy.proxy.store.keys import Keyring, hash_key
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.types import Limits

Running = Callable[..., AbstractAsyncContextManager[Any]]
CHAT = "http://127.0.0.1:7999"
SETTINGS = {"rewards": {"origins": [CHAT]}, "trainer": {"reward_weights": {"human": 1.0}}}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "EACH_S", 0.0)


@asynccontextmanager
async def asked(running: Running, directory: Path, **settings: Any) -> AsyncIterator[tuple[Any, str, str]]:
    """A system with a call, and a key for it."""
    async with running(directory, **{**SETTINGS, **settings}) as system:
        call_id = await called(system, "r")
        yield system, call_id, await key(system, "r", call_id)


async def called(system: Any, rollout: str, **headers: str) -> str:
    assert (await system.chat(rollout, **headers))[0] == 200
    found: str = (await system.call("GET", f"/rollouts/{rollout}", **headers))[1]["calls"][-1]["call_id"]
    return found


async def key(system: Any, rollout: str, call_id: str, **body: Any) -> str:
    status, answer = await system.call("POST", f"/rollouts/{rollout}/calls/{call_id}/reward-key", body)
    assert status == 200, answer
    made: str = answer["key"]
    return made


async def thumb(system: Any, key: Any, value: Any, origin: str = CHAT, **more: Any) -> int:
    body = json.dumps({"key": key, "value": value, **more}).encode()
    status: int = (await system.call("POST", "/thumb", body, Content_Type="text/plain", Origin=origin))[0]
    return status


async def rewards(system: Any, rollout: str = "r") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await system.call("GET", f"/rollouts/{rollout}"))[1]["rewards"]
    return found


@pytest.mark.usefixtures("at_once")
async def test_a_key_gives_its_call_one_value_that_may_be_changed(running: Running, tmp_path: Path) -> None:
    async with asked(running, tmp_path) as (system, call_id, given):
        for value in (1, -1, 0.5):
            assert await thumb(system, given, value) == 204
        (reward,) = await rewards(system)
        rollout = (await system.call("GET", "/rollouts/r"))[1]
        evidence = [row["evidence"] for row in await _rows(system)]
    assert (reward["reward"], reward["name"], reward["call_id"]) == (0.5, "human", call_id)
    assert (rollout["reward"], rollout["status"], reward["final"]) == (0.5, "running", False)
    assert evidence == [0]


@pytest.mark.usefixtures("at_once")
async def test_a_key_whose_reward_was_taken_back_replaces_no_other(running: Running, tmp_path: Path) -> None:
    async with asked(running, tmp_path) as (system, _, given):
        assert await thumb(system, given, 1) == 204
        (row,) = await _rows(system)
        assert (await system.call("DELETE", f"/rollouts/r/rewards/{row['reward_id']}"))[0] == 204
        await called(system, "other")
        body = {"rollout_id": "other", "reward": 1, "name": "human"}
        assert (await system.call("POST", "/reward", body))[0] == 200  # SQLite gives it the same number
        assert await thumb(system, given, -1) == 204
        assert [one["reward"] for name in ("r", "other") for one in await rewards(system, name)] == [-1, 1]
        assert (await system.call("GET", "/rollouts/other"))[1]["reward"] == 1


@pytest.mark.usefixtures("at_once")
async def test_whoever_waits_for_new_rewards_sees_that_a_value_changed(running: Running, tmp_path: Path) -> None:
    """A gate, and the watch over the policy's rewards, look again when the newest reward is another."""
    async with asked(running, tmp_path) as (system, _, given), system.store() as store:
        seen = []
        for value in (1, -1, 1):
            assert await thumb(system, given, value) == 204
            seen.append(await store.rewards.newest())
        assert len({*seen}) == 3


async def test_a_page_that_goes_away_is_no_error(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with asked(running, tmp_path) as (system, _, _):
        host, port = system.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /thumb HTTP/1.1\r\nHost: {host}\r\nOrigin: {CHAT}\r\nContent-Length: 9\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.2)
    assert "ClientDisconnected" not in caplog.text


async def test_a_key_changes_its_value_once_a_second(running: Running, tmp_path: Path) -> None:
    async with asked(running, tmp_path) as (system, _, given):
        assert [await thumb(system, given, value) for value in (1, -1)] == [204, 429]
        assert [one["reward"] for one in await rewards(system)] == [1]


@pytest.mark.usefixtures("at_once")
async def test_a_key_does_nothing_else(running: Running, tmp_path: Path) -> None:
    async with asked(running, tmp_path) as (system, _, given):
        assert [await thumb(system, given, value) for value in (1.1, -2, "1", None, True)] == [422] * 5
        assert await thumb(system, given, 1, retrain=True) == 422
        assert await thumb(system, given, 1, call_id="another") == 422
        assert await thumb(system, f"{given[:-1]}{'a' if given[-1] != 'a' else 'b'}", 1) == 401
        assert await thumb(system, "x" * 600, 1) == 413
        assert await _rows(system) == []


@pytest.mark.parametrize("origin", ["http://127.0.0.1:7998", "http://127.0.0.1:7999.evil.example", "null", ""])
async def test_another_origin_is_refused(running: Running, tmp_path: Path, origin: str) -> None:
    async with asked(running, tmp_path) as (system, _, given):
        assert await thumb(system, given, 1, origin) == 403
        assert await rewards(system) == []


async def test_without_origins_there_are_no_keys(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        status, answer = await system.call("POST", f"/rollouts/r/calls/{await called(system, 'r')}/reward-key")
    assert (status, answer["error"]["message"].split(":")[0]) == (403, "rewards.origins names no application")


def test_a_range_without_thumbs_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold a thumb"):
        Config.model_validate({"rewards": {"origins": [CHAT], "range": [0, 1]}})


async def test_a_key_ends_with_its_time_and_its_rollout(running: Running, tmp_path: Path) -> None:
    async with asked(running, tmp_path) as (system, call_id, given):
        old = await key(system, "r", call_id, expires_in_s=60)
        async with system.store() as store:
            hashed = {"hash": hash_key(old)}
            await store.database.commit([("UPDATE reward_keys SET expires_at = 1 WHERE key_hash = :hash", [hashed])])
        assert await thumb(system, old, 1) == 401
        await system.call("POST", "/rollouts/r/end", {"status": "completed"})
        assert (await system.call("DELETE", "/rollouts/r"))[0] in (200, 204)
        await called(system, "r")
        assert await thumb(system, given, 1) == 401
        assert await rewards(system) == []
        status, _ = await system.call("POST", f"/rollouts/r/calls/{call_id}/reward-key")
        assert status == 404


async def test_a_key_is_of_its_askers_rollouts_and_ends_with_the_askers_key(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"], **SETTINGS) as system:
        own, other = [await stored_key(system, name) for name in ("a", "b")]
        call_id = await called(system, "r", **own)
        route = f"/rollouts/r/calls/{call_id}/reward-key"
        assert (await system.call("POST", route, **other))[0] == 404
        assert (await system.call("POST", route, {"evidence": True}, **own))[0] == 403
        given = (await system.call("POST", route, **own))[1]["key"]
        as_a_key = {"Authorization": f"Bearer {given}"}
        assert (await system.call("POST", "/reward", {"rollout_id": "r", "reward": 1}, **as_a_key))[0] == 401
        assert (await system.call("POST", route, **as_a_key))[0] == 401
        async with opened(system.config.store) as database:
            await Keyring(database).revoke("a")
        assert await thumb(system, given, 1) == 401


async def test_a_thumb_is_evidence_where_the_application_says_so(running: Running, tmp_path: Path) -> None:
    async with asked(running, tmp_path) as (system, call_id, _):
        assert await thumb(system, await key(system, "r", call_id, evidence=True), 1) == 204
        assert [row["evidence"] for row in await _rows(system)] == [1]


async def stored_key(system: Any, name: str) -> dict[str, str]:
    """A key for its own rollouts that the proxy knows by now."""
    async with opened(system.config.store) as database:
        made, _ = await Keyring(database).create(name, "agent", Limits(), recording=True, scope="own")
    bearer = {"Authorization": f"Bearer {made}"}
    async with asyncio.timeout(10):
        while (await system.call("GET", "/rollouts", **bearer))[0] != 200:
            await asyncio.sleep(0.05)
    return bearer


async def _rows(system: Any) -> list[Any]:
    async with system.store() as store:
        return [*await store.database.all("SELECT * FROM rewards ORDER BY reward_id")]
