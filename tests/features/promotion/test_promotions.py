"""Which rollouts a test takes and who decides it, with several proxies on one store, and after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from contract.system import CLI
from lightning_proxy.cli import app
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.features.promotion import proxy as gate
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.features.promotion.proxy import Gate
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.calls import ANSWERED
from support.paths import TESTS
from support.served import proxy_in_front
from support.stores import store_url


def config_of(url: str, group_size: int, **gate: Any) -> Config:
    return Config.model_validate({
        "store": {"url": url}, "policy": {"publish": "lora"}, "promotion": {"mode": "gated", **gate},
        "trainer": {"group_size": group_size},
    })  # fmt: skip


async def begun(store: Store) -> Any:
    version = await store.versions.new("lora", 1, {})
    await store.versions.saved(version, "/nowhere", f"policy-v{version}")
    tests = Promotions(store.database)
    await tests.begin(version, 1, 0)
    return await tests.under_way()


@asynccontextmanager
async def filled(url: str) -> AsyncIterator[Any]:
    """A test with enough rewards for a decision."""
    config = config_of(url, 2)
    async with opened(config.store) as database:
        store = Store(database)
        test, tests = await begun(store), Promotions(database)
        for n in range(40):
            version = await tests.assign(test, RolloutName(f"r{n}", f"t{n // 2}"), config)
            await database.commit([(ANSWERED, [{"rollout_id": f"r{n}", "version": version}])])
            await store.rewards.post([Reward(f"r{n}", float(version == test.version))], None, b"")
        yield config, store, test


@pytest.fixture
async def tested(tmp_path: Path) -> AsyncIterator[Any]:
    async with filled(store_url(tmp_path)) as tested:
        yield tested


async def test_siblings_that_begin_at_once_at_two_proxies_are_split_evenly(tmp_path: Path) -> None:
    config = config_of(store_url(tmp_path), 8)
    async with opened(config.store) as one, opened(config.store) as other:
        test = await begun(Store(one))

        async def began(n: int) -> int:
            """Each begins at both."""
            return await Promotions((one, other)[n % 2]).assign(test, RolloutName(f"r{n // 2}", "t"), config)

        found = await asyncio.gather(*map(began, range(32)))
        assert found[::2] == found[1::2]
        assert Counter(found[::2]) == {0: 8, test.version: 8}
        assert sorted(seen.place for seen in await Promotions(one).observed(test)) == list(range(16))


async def test_no_candidate_goes_live_while_publication_is_stopped_for_a_collapse(
    tested: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store, _ = tested
    tests = Promotions(store.database)
    with monkeypatch.context() as patched:
        patched.setattr(store.steps, "collapse", AsyncMock())
        await Gate(config, store, tests).look()
    assert (await store.versions.live()).version == 0
    test = (await tests.last())[1]
    assert (test.status, test.evidence["waits"]) == ("testing", "publishing has stopped after a collapse")
    await Gate(config, store, tests).look()
    assert (await store.versions.live()).version == 1


@pytest.mark.sqlite  # the lock on a server sleeps, too
async def test_an_error_in_a_look_does_not_end_the_gate(tested: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, store, _ = tested
    looks = AsyncMock(side_effect=[RuntimeError("a fault of the gate's own"), 0])
    monkeypatch.setattr(Gate, "look", looks)
    monkeypatch.setattr(gate, "LOOK_S", 0.01)
    running = asyncio.create_task(Gate(config, store, Promotions(store.database)).run())
    while looks.await_count < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_rollout_is_put_into_a_test_that_has_all_that_it_takes_or_was_decided_meanwhile(
    tested: Any,
) -> None:
    config, store, test = tested
    tests, late = Promotions(store.database), [RolloutName(f"late{n}", "t") for n in range(2)]
    full = config_of(config.store.url, 2, max_rollouts=40)
    assert [await tests.assign(test, one, full) for one in late] == [0, 0]
    assert await tests.decide(test, "rejected", "as the test says", {})
    assert [await tests.assign(test, one, config) for one in late] == [0, 0]
    assert len(await tests.observed(test)) == 40


async def test_what_a_rollout_is_observed_by_is_read_off_its_calls_and_rewards(tested: Any) -> None:
    _, store, test = tested
    tests = Promotions(store.database)
    for statement in (
        "UPDATE calls SET status = 'ok', finish_reason = 'length', latency_ms = 40.0 WHERE rollout_id = 'r0'",
        "UPDATE rollouts SET calls = 2, tokens = 7 WHERE rollout_id = 'r0'",
        "UPDATE calls SET policy_version = 1 - policy_version WHERE rollout_id = 'r1'",
        "UPDATE rollouts SET foreign_calls = 1 WHERE rollout_id = 'r2'",
        "DELETE FROM rewards WHERE rollout_id = 'r3'",
        "UPDATE promotion_rollouts SET evidence = 1 WHERE rollout_id = 'r3'",
        "UPDATE rollouts SET status = 'failed', end_counts = 0 WHERE rollout_id = 'r4'",
        "INSERT INTO calls (call_id, rollout_id, seq, endpoint, status, policy_version, started_at, request)"
        " SELECT 'more', rollout_id, 1, endpoint, status, 1 - policy_version, 2, '{}' FROM calls WHERE call_id = 'r5'",
    ):
        await store.database.execute(statement)
    seen = {one.rollout_id: one for one in await tests.observed(test)}
    assert len(seen) == 40
    first = seen["r0"]
    assert (first.truncated, first.latency, first.answer_tokens, first.tool_errors) == (1.0, 40.0, 3.5, 0.0)
    assert [bool(seen[f"r{n}"].alone) for n in (0, 1, 2, 3, 5)] == [True, False, False, True, False]
    assert [one for one in seen if seen[one].unrewarded] == ["r3"] and seen["r3"].rewards == ()
    assert seen["r4"].status == "completed", "no key that gives evidence has said that it failed"


@pytest.mark.long
@pytest.mark.sqlite
async def test_a_decision_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next proxy decides, by the same numbers."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    async with proxy_in_front(tmp_path, (sys.executable, __file__)) as proxy:
        proxy.set("promotion", mode="gated")
        proxy.set("trainer", group_size=2)
        async with filled(f"sqlite:///{proxy.store}"):
            pass
        start = asyncio.create_task(proxy.start())
        while proxy.process is None:
            await asyncio.sleep(0.05)
        assert await proxy.process.wait() == -signal.SIGKILL
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        assert proxy.rows("SELECT status, decided_at FROM promotions") == [("testing", None)]
        assert proxy.rows("SELECT status FROM policy_versions ORDER BY version") == [("live",), ("candidate",)]
        proxy.program = CLI
        await proxy.start()
        while not (decided := proxy.rows("SELECT status, evidence FROM promotions WHERE status <> 'testing'")):
            await asyncio.sleep(0.1)
        ((status, evidence),) = decided
        assert (status, json.loads(evidence)["metrics"]["reward"]["pairs"]) == ("promoted", 20)
        assert proxy.rows("SELECT version FROM policy_log ORDER BY n DESC LIMIT 1") == [(1,)]


def killed_when_deciding() -> None:
    """`lightning-proxy`, killed with SIGKILL inside of the transaction by which its gate decides."""
    decide = Promotions.decide

    async def killed(self: Promotions, *args: Any) -> bool:
        write = self._db.write

        async def half(work: Any, size: int = 0) -> Any:
            async def then_die(db: Any) -> None:
                await work(db)
                os.kill(os.getpid(), signal.SIGKILL)

            return await write(then_die, size)

        self._db.write = half  # type: ignore[assignment, method-assign]
        return await decide(self, *args)

    Promotions.decide = killed  # type: ignore[assignment, method-assign]
    app()


if __name__ == "__main__":
    killed_when_deciding()
