"""Only an admin's key, and one made with `keys create --evaluator`, decides which version goes live."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.promotion import gate
from lightning_proxy.features.promotion.commands import line_of
from lightning_proxy.features.promotion.promotions import Promotions

GATED = {"promotion": "gated", "gate": {"max_rollouts": 40}}
ADMIN = {"Authorization": "Bearer admin"}
CONFIGURED = {"Authorization": "Bearer agent"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_S", 0.05)


@asynccontextmanager
async def gate_closed(running: Any, tmp_path: Path, keys: bool = True) -> AsyncIterator[Any]:
    """A proxy that tests version 1 against version 0."""
    settings = {"api_keys": ["agent"], "admin_keys": ["admin"]} if keys else {}
    async with running(tmp_path, publish="lora", policy=GATED, trainer={"group_size": 2}, **settings) as system:
        async with system.store() as store:
            assert await system.candidate(store, tmp_path) == 1
        async with asyncio.timeout(20):
            while "policy-v1" not in system.vllm.adapters:
                await asyncio.sleep(0.05)
        yield system


async def called(system: Any, rollout: str, key: dict[str, str]) -> int:
    """The version that answered a call of the rollout."""
    headers = {"X-Rollout-Id": rollout} | key
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    async with system.session.post(f"{system.url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return int(answer.headers["X-Policy-Version"])


async def began(
    system: Any, opener: dict[str, str], *, own_keys: bool = False, n: int = 40
) -> list[tuple[str, int, dict[str, str]]]:
    """Rollouts that take part in the test, each with its version and the key that is used for it."""
    found = []
    for _ in range(n // 2):
        status, made = await system.call("POST", "/rollouts", {"task_id": f"t{len(found)}", "n": 2}, **opener)
        assert status == 200, made
        for one in made:
            name, own = one["rollout_id"], {"Authorization": f"Bearer {one['api_key']}"}
            key = own if own_keys else opener
            found.append((name, await called(system, name, key), key))
    return found


async def reward(system: Any, rollouts: Any, key: dict[str, str] | None = None, *, good: int = 1) -> None:
    rewards = [{"rollout_id": name, "reward": float(version == good)} for name, version, _ in rollouts]
    if key is not None:
        assert (await system.call("POST", "/reward", rewards, **key))[0] == 200
        return
    for one, (_, _, own) in zip(rewards, rollouts, strict=True):
        assert (await system.call("POST", "/reward", one, **own))[0] == 200


async def last_test(system: Any) -> Any:
    _, versions = await system.call("GET", "/policy/versions", **ADMIN)
    return next(one["promotion"] for one in versions["data"] if one["version"] == 1)


async def looked(system: Any) -> Any:
    """The test after the gate has looked at all that there is: its numbers do not change any more."""
    seen: Any = None
    async with asyncio.timeout(20):
        for _ in range(3):
            await asyncio.sleep(0.5)
            seen = await last_test(system)
    return seen


async def decided(system: Any) -> Any:
    async with asyncio.timeout(30):
        while (test := await last_test(system))["status"] == "testing":
            await asyncio.sleep(0.05)
    return test


@pytest.mark.parametrize("scope", ["own rollout's", "configured"])
async def test_a_key_that_is_no_evaluators_decides_nothing(running: Any, tmp_path: Path, scope: str) -> None:
    async with gate_closed(running, tmp_path) as system:
        key = CONFIGURED if scope == "configured" else await system.key("a", scope=scope.partition(" ")[0])
        found = await began(system, key, own_keys="rollout" in scope)
        assert Counter(version for _, version, _ in found) == {0: 20, 1: 20}
        await reward(system, found)
        test = await looked(system)
        assert (test["status"], test["evidence"].get("rollouts", 0)) == ("testing", 0)
        assert "0 of at most 40 rollouts that an admin's or an evaluator's key opened" in line_of(test).plain
        # It does not use up the bound of the test either.
        evaluator = await system.key("e", evaluator=True)
        found = await began(system, evaluator)
        assert Counter(version for _, version, _ in found) == {0: 20, 1: 20}
        await reward(system, found, evaluator, good=0)
        assert (await decided(system))["status"] == "rejected"


@pytest.mark.parametrize("who", ["admin", "own evaluator", "evaluator's rollout"])
async def test_an_admins_and_an_evaluators_rewards_decide(running: Any, tmp_path: Path, who: str) -> None:
    async with gate_closed(running, tmp_path) as system:
        scope = "own" if who.startswith("own") else "all"
        key = ADMIN if who == "admin" else await system.key("e", evaluator=True, scope=scope)
        found = await began(system, key, own_keys="rollout" in who)
        await reward(system, found)
        test = await decided(system)
        assert (test["status"], test["evidence"]["metrics"]["reward"]["difference"]) == ("promoted", 1.0)


async def test_without_keys_everybody_decides(running: Any, tmp_path: Path) -> None:
    async with gate_closed(running, tmp_path, keys=False) as system:
        await reward(system, await began(system, {}, own_keys=True))
        assert (await decided(system))["status"] == "promoted"


async def test_an_evaluators_word_about_a_tenants_rollouts_counts_and_the_tenants_own_does_not(
    running: Any, tmp_path: Path
) -> None:
    async with gate_closed(running, tmp_path) as system:
        tenant, evaluator = await system.key("t", scope="own"), await system.key("e", evaluator=True)
        found = await began(system, tenant)
        await reward(system, found, evaluator, good=0)
        await reward(system, found, tenant, good=1)  # the newest value, but no evidence
        test = await decided(system)
        assert (test["status"], test["evidence"]["metrics"]["reward"]["difference"]) == ("rejected", -1.0)


async def test_a_tenants_rollout_is_no_evidence_once_the_evaluators_word_is_taken_back(
    running: Any, tmp_path: Path
) -> None:
    async with gate_closed(running, tmp_path) as system, system.store() as store:
        tests = Promotions(store.database)
        test = await tests.under_way()
        assert test is not None
        (name, _, _), _ = await began(system, await system.key("t", scope="own"), n=2)
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
        other, evaluator = await system.key("o"), await system.key("e", evaluator=True)
        found = await began(system, evaluator)
        for name, version, _ in found:
            if version == 1:
                assert (await system.call("POST", f"/rollouts/{name}/end", {"status": status}, **other))[0] == 200
        await reward(system, found, evaluator)
        test = await decided(system)
        assert (test["status"], test["evidence"]["candidate"]["failed"]) == ("promoted", 0)


async def test_a_tenant_does_not_shift_the_sides_of_an_evaluators_rollouts(running: Any, tmp_path: Path) -> None:
    async with gate_closed(running, tmp_path) as system:
        tenant = await system.key("t", scope="own")
        sides = Counter[int]()
        for i in range(8):
            for name, key in ((f"mine{i}", tenant), (f"a{i}", ADMIN), (f"b{i}", ADMIN)):
                _, opened = await system.call("POST", "/rollouts", {"task_id": "t"}, **key)
                sides[await called(system, opened[0]["rollout_id"], key)] += name[0] != "m"
            assert sides[0] == sides[1] == i + 1
