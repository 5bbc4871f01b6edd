"""What a look of the gate leaves alone: a stop for a collapse, a test that is decided, and the gate's own life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.features.promotion import gate
from lightning_proxy.features.promotion.gate import Gate
from lightning_proxy.features.promotion.promotions import Assigned, Promotions, UnderTest
from lightning_proxy.features.promotion.splitting import PolicySplit
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import Collapse
from support.calls import ANSWERED
from support.stores import store_url

Tested = tuple[Config, Store, UnderTest]


def of_policy(config: Config, store: Store) -> Gate:
    return Gate(config, store, Promotions(store.database))


@pytest.fixture
async def tested(tmp_path: Path) -> AsyncIterator[Tested]:
    """A test whose rewards are enough to promote its candidate."""
    config = Config.model_validate(
        {
            "store": {"url": store_url(tmp_path)},
            "policy": {"publish": "lora"},
            "promotion": {"mode": "gated"},
            "trainer": {"group_size": 2},
        }
    )
    async with opened(config.store) as database:
        store = Store(database)
        version = await store.versions.new("lora", 1, {})
        await Promotions(store.database).wait(version, 1)
        await Promotions(store.database).begin(version, 0)
        trial = await Promotions(store.database).now()
        assert trial is not None
        live, filled = await store.versions.live(), PolicySplit(config, Promotions(store.database))
        for n in range(40):
            side = await filled(RolloutName(f"r{n}", f"t{n // 2}"), live)
            await database.commit([(ANSWERED, [{"rollout_id": f"r{n}", "version": side.version}])])
            await store.rewards.post([Reward(f"r{n}", float(side.version == version))], None, b"")
        yield config, store, trial


async def test_no_candidate_goes_live_while_publication_is_stopped_for_a_collapse(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store, _ = tested
    live = await store.versions.live()
    stop = Collapse("entropy", "entropy fell", time.time(), live.live_at, 0)  # type: ignore[arg-type]

    async def stopped() -> Collapse:
        return stop

    with monkeypatch.context() as patched:
        patched.setattr(store.steps, "collapse", stopped)
        await of_policy(config, store).look()
    assert (await store.versions.live()).version == 0
    test = (await Promotions(store.database).last())[1]
    assert (test.status, test.evidence["waits"]) == ("testing", "publication is stopped for a collapse"), asdict(test)
    await of_policy(config, store).look()
    assert (await store.versions.live()).version == 1


async def test_an_unexpected_error_in_a_look_does_not_end_the_gate(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store, _ = tested
    monkeypatch.setattr(gate, "LOOK_S", 0.01)
    look, looks = Gate.look, list[int]()

    async def faulty(self: Gate) -> None:
        looks.append(1)
        if len(looks) == 1:
            raise RuntimeError("a fault of the gate's own")
        await look(self)

    monkeypatch.setattr(Gate, "look", faulty)
    running = asyncio.create_task(of_policy(config, store).run())
    async with asyncio.timeout(20):
        while (await store.versions.live()).version == 0:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(looks) > 1


async def test_no_rollout_is_put_into_a_test_that_was_decided_meanwhile(tested: Tested) -> None:
    _, store, trial = tested
    assert await Promotions(store.database).decide(trial.promotion, "rejected", "as the test says", {})
    before = len(await Promotions(store.database).observed(trial.promotion))

    def candidate(_: str | None, place: int) -> Assigned:
        return Assigned(place, trial.promotion.version, compared=True)

    assert await Promotions(store.database).assign(trial.promotion, RolloutName("late", "t"), 1000, candidate) == 0
    assert len(await Promotions(store.database).observed(trial.promotion)) == before


@pytest.mark.sqlite  # the lock on a server sleeps, too
async def test_the_gate_looks_again_in_a_second_however_long_a_look_took_under_load(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store, _ = tested
    rests: list[float] = []
    sleep = asyncio.sleep

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await sleep(3600 if len(rests) > 1 else 0)

    look = Gate.look

    async def slow(self: Gate) -> None:
        await sleep(0.5)  # others have the processor
        await look(self)

    monkeypatch.setattr(Gate, "look", slow)
    monkeypatch.setattr(gate.asyncio, "sleep", rest)
    running = asyncio.create_task(of_policy(config, store).run())
    async with asyncio.timeout(20):
        while len(rests) < 2:
            await sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert rests == [gate.LOOK_S] * 2
