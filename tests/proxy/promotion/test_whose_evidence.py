"""Only an admin's key, and one made with `keys create --evaluator`, decides which version goes live."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.gate import gate
from lightning_proxy.proxy.prompts.prompt_tests import PromptTests
from lightning_proxy.proxy.store.keys import Keyring
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.sqlite.migrate import FIRST
from lightning_proxy.proxy.types import Limits
from support.paths import ROOT

GATED = {"promotion": "gated", "gate": {"max_rollouts": 40}}
TEXTS = ("You are a writer.", "You are a careful writer.")
ADMIN = {"Authorization": "Bearer admin"}
CONFIGURED = {"Authorization": "Bearer agent"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_S", 0.05)


async def key_of(system: Any, name: str, **more: Any) -> dict[str, str]:
    """A stored key that the proxy knows by now."""
    async with opened(system.config.store) as database:
        key, _ = await Keyring(database).create(name, "agent", Limits(), recording=True, **more)
    headers = {"Authorization": f"Bearer {key}"}
    async with asyncio.timeout(10):
        while (await system.call("GET", "/rollouts", **headers))[0] != 200:
            await asyncio.sleep(0.05)
    return headers


@asynccontextmanager
async def gate_closed(running: Any, tmp_path: Path, keys: bool = True) -> AsyncIterator[Any]:
    """A proxy that tests version 2 of the prompt `writer`."""
    settings = {"api_keys": ["agent"], "admin_keys": ["admin"]} if keys else {}
    async with running(tmp_path, prompts=GATED, trainer={"group_size": 2}, **settings) as system:
        for text in TEXTS:
            body = {"name": "writer", "text": text, "match": {"agent": "writer"}}
            assert (await system.call("POST", "/prompts", body, **ADMIN))[0] == 200
        await asyncio.sleep(0.6)  # the first prompt of a running proxy
        assert (await system.call("POST", "/prompts/writer/test", {"version": 2}, **ADMIN))[0] == 200
        yield system


async def called(system: Any, rollout: str, key: dict[str, str]) -> None:
    messages = [{"role": "system", "content": TEXTS[0]}, {"role": "user", "content": "go"}]
    body = {"model": "policy", "messages": messages}
    status, answer = await system.call("POST", f"/rollouts/{rollout}/agents/writer/v1/chat/completions", body, **key)
    assert status == 200, answer


async def began(
    system: Any, opener: dict[str, str], *, own_keys: bool = False, call: bool = True, n: int = 40
) -> list[tuple[str, int, dict[str, str]]]:
    """Rollouts that take part in the test, each with its version and the key that is used for it."""
    found = []
    for _ in range(n // 2):
        status, made = await system.call("POST", "/rollouts", {"task_id": f"t{len(found)}", "n": 2}, **opener)
        assert status == 200, made
        for one in made:
            name, own = one["rollout_id"], {"Authorization": f"Bearer {one['api_key']}"}
            key = own if own_keys else opener
            _, prompt = await system.call("GET", "/prompts/writer", **{"X-Rollout-Id": name}, **key)
            if call:
                await called(system, name, key)
            found.append((name, prompt["version"], key))
    return found


async def reward(system: Any, rollouts: Any, key: dict[str, str] | None = None, *, good: int = 2) -> None:
    rewards = [{"rollout_id": name, "reward": float(version == good)} for name, version, _ in rollouts]
    if key is not None:
        assert (await system.call("POST", "/reward", rewards, **key))[0] == 200
        return
    for one, (_, _, own) in zip(rewards, rollouts, strict=True):
        assert (await system.call("POST", "/reward", one, **own))[0] == 200


async def looked(system: Any) -> Any:
    """The test after the gate has looked at all that there is: its numbers do not change any more."""
    seen: Any = None
    async with asyncio.timeout(20):
        for _ in range(3):
            await asyncio.sleep(0.5)
            _, prompt = await system.call("GET", "/prompts/writer", **ADMIN)
            seen = prompt["versions"][1]["promotion"]
    return seen


async def decided(system: Any) -> Any:
    async with asyncio.timeout(30):
        while True:
            _, prompt = await system.call("GET", "/prompts/writer", **ADMIN)
            if (test := prompt["versions"][1]["promotion"])["status"] != "testing":
                return test
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("scope", "call"), [("own", False), ("own rollout's", True), ("all", True), ("configured", True)]
)
async def test_a_key_that_is_no_evaluators_decides_nothing(
    running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, scope: str, call: bool
) -> None:
    async with gate_closed(running, tmp_path) as system:
        key = CONFIGURED if scope == "configured" else await key_of(system, "a", scope=scope.partition(" ")[0])
        found = await began(system, key, call=call, own_keys="rollout" in scope)
        assert Counter(version for _, version, _ in found) == {1: 20, 2: 20}
        await reward(system, found)
        test = await looked(system)
        assert (test["status"], test["evidence"].get("rollouts", 0)) == ("testing", 0)
        assert sum("no rollout of its test is evidence" in line for line in caplog.messages) == 1
        # It does not use up the bound of the test either.
        evaluator = await key_of(system, "e", evaluator=True)
        found = await began(system, evaluator)
        assert Counter(version for _, version, _ in found) == {1: 20, 2: 20}
        await reward(system, found, evaluator, good=1)
        assert (await decided(system))["status"] == "rejected"


@pytest.mark.parametrize("who", ["admin", "evaluator", "own evaluator", "evaluator's rollout"])
async def test_an_admins_and_an_evaluators_rewards_decide(running: Any, tmp_path: Path, who: str) -> None:
    async with gate_closed(running, tmp_path) as system:
        scope = "own" if who.startswith("own") else "all"
        key = ADMIN if who == "admin" else await key_of(system, "e", evaluator=True, scope=scope)
        found = await began(system, key, own_keys="rollout" in who)
        await reward(system, found)
        test = await decided(system)
        assert (test["status"], test["evidence"]["metrics"]["reward"]["difference"]) == ("promoted", 1.0)


async def test_the_gate_of_policies_counts_the_same_keys(running: Any, tmp_path: Path) -> None:
    keys = {"api_keys": ["agent"], "admin_keys": ["admin"]}
    async with running(tmp_path, publish="lora", policy=GATED, trainer={"group_size": 2}, **keys) as system:
        tenant = await key_of(system, "a", scope="own")
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        async with asyncio.timeout(20):
            while f"policy-v{version}" not in system.vllm.adapters:
                await asyncio.sleep(0.05)

        async def test() -> Any:
            _, seen = await system.call("GET", "/policy/versions", **ADMIN)
            return next(one["promotion"] for one in seen["data"] if one["version"] == version)

        for key, good in ((tenant, version), (ADMIN, 0)):
            for i in range(40):
                status, (made,) = await system.call("POST", "/rollouts", {"task_id": f"t{i // 2}"}, **key)
                name = made["rollout_id"]
                assert (status, (await system.chat(name, **key))[0]) == (200, 200)
                _, seen = await system.call("GET", f"/rollouts/{name}", **key)
                body = {"rollout_id": name, "reward": float(seen["calls"][0]["policy_version"] == good)}
                assert (await system.call("POST", "/reward", body, **key))[0] == 200
            if key is tenant:
                await asyncio.sleep(1.0)
                assert (await test())["status"] == "testing"
        async with asyncio.timeout(30):
            while (found := await test())["status"] == "testing":
                await asyncio.sleep(0.05)
        assert (found["status"], found["evidence"]["metrics"]["reward"]["difference"]) == ("rejected", -1.0)


async def test_without_keys_everybody_decides(running: Any, tmp_path: Path) -> None:
    async with gate_closed(running, tmp_path, keys=False) as system:
        await reward(system, await began(system, {}, own_keys=True))
        assert (await decided(system))["status"] == "promoted"


async def test_an_evaluators_word_about_a_tenants_rollouts_counts_and_the_tenants_own_does_not(
    running: Any, tmp_path: Path
) -> None:
    async with gate_closed(running, tmp_path) as system:
        tenant, evaluator = await key_of(system, "t", scope="own"), await key_of(system, "e", evaluator=True)
        found = await began(system, tenant)
        await reward(system, found, evaluator, good=1)
        await reward(system, found, tenant, good=2)  # the newest value, but no evidence
        test = await decided(system)
        assert (test["status"], test["evidence"]["metrics"]["reward"]["difference"]) == ("rejected", -1.0)


async def test_a_tenants_rollout_is_no_evidence_once_the_evaluators_word_is_taken_back(
    running: Any, tmp_path: Path
) -> None:
    async with gate_closed(running, tmp_path) as system, system.store() as store:
        tests = PromptTests(store.database)
        (test,) = await tests.under_way()
        (name, _, _), _ = await began(system, await key_of(system, "t", scope="own"), n=2)
        seen = []
        for value in (1, 0):
            body = {"rollout_id": name, "reward": value, "name": "human"}
            given = (await system.call("POST", "/reward", body, **ADMIN))[1]["reward_id"]
            route = f"/rollouts/{name}/rewards/{given}"
            seen.append(len(await tests.observed(test)))
            assert (await system.call("DELETE", route, **ADMIN))[0] == 204
            seen.append(len(await tests.observed(test)))
        assert seen == [1, 0, 1, 0]


@pytest.mark.parametrize("status", ["failed", "discarded"])
async def test_a_rollout_that_another_key_ended_has_not_failed(running: Any, tmp_path: Path, status: str) -> None:
    async with gate_closed(running, tmp_path) as system:
        other, evaluator = await key_of(system, "o"), await key_of(system, "e", evaluator=True)
        found = await began(system, evaluator)
        for name, version, _ in found:
            if version == 2:
                assert (await system.call("POST", f"/rollouts/{name}/end", {"status": status}, **other))[0] == 200
        await reward(system, found, evaluator)
        test = await decided(system)
        assert (test["status"], test["evidence"]["candidate"]["failed"]) == ("promoted", 0)


async def test_a_rollout_without_a_call_of_its_version_is_no_evidence(running: Any, tmp_path: Path) -> None:
    async with gate_closed(running, tmp_path) as system:
        await reward(system, await began(system, ADMIN, call=False, n=20), ADMIN)
        test = await looked(system)
        assert (test["status"], test["evidence"]["metrics"]["reward"]["pairs"]) == ("testing", 0)


async def test_a_tenant_does_not_shift_the_sides_of_an_evaluators_rollouts(running: Any, tmp_path: Path) -> None:
    async with gate_closed(running, tmp_path) as system:
        tenant = await key_of(system, "t", scope="own")
        sides = Counter[int]()
        for i in range(8):
            for name, key in ((f"mine{i}", tenant), (f"a{i}", ADMIN), (f"b{i}", ADMIN)):
                _, opened = await system.call("POST", "/rollouts", {"task_id": "t"}, **key)
                asked = {"X-Rollout-Id": opened[0]["rollout_id"]}
                _, prompt = await system.call("GET", "/prompts/writer", **asked, **key)
                sides[prompt["version"]] += name[0] != "m"
            assert sides[1] == sides[2] == i + 1


@pytest.mark.sqlite
@pytest.mark.parametrize("keys", [0, 1])
async def test_a_test_that_is_under_way_at_an_upgrade_keeps_its_evidence_where_there_never_was_a_key(
    tmp_path: Path, keys: int
) -> None:
    scripts = sorted((ROOT / "proxy/store/migrations").glob("*.sql"))
    before = [script for script in scripts if script.name < next(s.name for s in scripts if "_evidence" in s.name)]
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db:
        for script in before:
            db.executescript(script.read_text())
        db.execute(f"PRAGMA user_version = {FIRST + len(before)}")
        db.executescript("""
            INSERT INTO prompt_versions (name, version, text, created_at) VALUES ('p', 1, 'a', 1), ('p', 2, 'b', 1);
            INSERT INTO prompt_tests (name, version, against, status, began_at) VALUES ('p', 2, 1, 'testing', 1);
            INSERT INTO rollouts (rollout_id, created_at) VALUES ('r', 1);
            INSERT INTO rewards (rollout_id, name, value, final, created_at) VALUES ('r', 'reward', 1, 1, 1);
            INSERT INTO prompt_test_rollouts (test, rollout_id, place, version, compared, at)
            VALUES (1, 'r', 0, 2, 1, 1);
        """)
        if keys:
            db.execute("INSERT INTO keys (key_id, key_hash, name, role, created_at) VALUES ('k', 'h', 'a', 'agent', 1)")
        db.commit()
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path / 'store.db'}")) as database:
        tests = PromptTests(database)
        (test,) = await tests.under_way()
        assert [len(one.rewards) for one in await tests.observed(test)] == [1] * (not keys)
