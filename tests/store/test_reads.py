"""What is read of versions, steps and rollouts: each the few that it needs, and a search is bounded."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Reward, RolloutName, Sender
from lightning_proxy.core.returns import Rules, earned
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store import rollouts as searching
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import do_again, store_url


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield Store(database)


async def published(store: Store, adapters: tuple[str, ...] = (), *, checkpoint: bool = True) -> int:
    """A version that was live, of a step with a checkpoint."""
    step = await store.steps.claim([], 0)
    await store.steps.trained(step, f"step-{step}" if checkpoint else None, {})
    version = await store.versions.new("lora", step, {})
    served = f"policy-v{version}"
    await store.versions.saved(version, served, served, {name: f"{served}.{name}" for name in adapters})
    await store.versions.set_live(version, step)
    return version


async def asked(recorder: Recorder, name: str, call_id: str, at: float = 1.0, version: int = 0, text: str = "") -> None:
    request = {"messages": [{"role": "user", "content": text}]}
    await recorder.start(CallStart(call_id, RolloutName(name), "chat/completions", "p", version, request, at))


async def test_a_version_is_found_by_each_name_that_it_is_served_under(store: Store) -> None:
    for adapters in ((), ("planner", "coder.small"), ()):
        await published(store, adapters)
    names = {"policy-v1": 1, "policy-v2": 2, "policy-v2.planner": 2, "policy-v2.coder.small": 2, "policy-v3": 3}
    names |= dict.fromkeys(("policy-v2.coder", "policy-v1.planner", "policy-v4", "policy", "", "."))
    assert {name: await store.versions.named(name) for name in names} == names


async def test_what_is_to_be_served_is_what_is_live_tested_or_pinned_and_has_files(store: Store) -> None:
    for _ in range(5):
        await published(store)
    candidate = await store.versions.new("lora", 5, {})
    await store.versions.saved(candidate, "path", "policy-v6")
    await Promotions(store.database).begin(candidate, 5, 5)
    await store.versions.forget_files(2)
    assert [v.version for v in await store.versions.to_serve({0, 2, 3})] == [3, 5, 6]
    assert [v.version for v in await store.versions.with_files()] == [1, 3, 4, 5, 6]
    assert [v.version for v in await store.versions.of_status("candidate")] == [6]


async def test_old_checkpoints_are_those_of_no_version_with_files(store: Store) -> None:
    for checkpoint in (True, True, False, True, True, True):
        await published(store, checkpoint=checkpoint)
    for version in (1, 3, 4):
        await store.versions.forget_files(version)
    assert await store.steps.old_checkpoints(2) == [(1, "step-1"), (4, "step-4")]
    assert await store.steps.old_checkpoints(9) == []


async def test_a_rollout_that_began_too_long_ago_holds_no_version(store: Store) -> None:
    async with Recorder(store, merged=False) as recorder:
        await asked(recorder, "old", "c0", 1000.0)
        await asked(recorder, "new", "c7", 5000.0, version=7)
    assert [await store.rollouts.opened_for(name) for name in ("old", "new")] == [(None, 0), (None, 7)]
    for since, wanted in ((400.0, {0, 7}), (3400.0, {7}), (5400.0, set())):
        assert await store.versions.pinned(since) == wanted


async def ids(store: Store, limit: int = 100, cursor: int | None = None, **filters: object) -> list[str]:
    return [r.rollout_id for r in (await store.rollouts.page(filters, limit, cursor))[0]]


async def test_a_search_looks_at_so_many_and_can_go_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "CHUNK", 2)
    monkeypatch.setattr(searching, "MOST", 4)
    for i in range(6):
        await store.rollouts.open([(RolloutName(f"r{i}", "t"), f"hash {i}")], {})
        await store.rewards.post([Reward(f"r{i}", float(i == 0))])
    found, cursor = await store.rollouts.page({"min_reward": 1}, 9)
    assert found == [] and cursor is not None
    assert await ids(store, min_reward=1, cursor=cursor) == ["r0"]


async def test_texts_are_found_as_they_were_said(store: Store) -> None:
    texts = ['say "50%_off"', "ÄPFEL sind", "two\nlines", "!"]
    async with Recorder(store, merged=False) as recorder:
        for i, text in enumerate([*texts, "something else: 50 off"]):
            await asked(recorder, f"r{i}", f"c{i}", text=f"please {text} now")
    assert [await ids(store, text=text) for text in (*texts, "NOTHING of it")] == [["r0"], ["r1"], ["r2"], ["r3"], []]


# The return that the store keeps of a rollout is that of the pure function, whatever was posted, in whatever order.

NAMES = ("reward", "style", "nothing", "other")
RULES = [
    Rules({"reward": 1.0}),
    Rules({"reward": 0.3, "style": -1.7, "nothing": 0.0}, failed=0.0),
    Rules({"style": 1e12, "reward": 1e-9}, failed=-1.0),
    Rules({"other": 0.1}),
]
VALUES = (0.1, 0.2, 0.3, -0.1, 1.0, 0.0, 1e-12, -9999.9, 1e300, 5e-324)


async def agrees(store: Store, rollouts: Sequence[str]) -> None:
    rules = await store.rewards.rules()
    for name in rollouts:
        kept, posted = await store.rollouts.get(name), await store.rewards.of(name)
        found = earned(posted, rules, kept.status)
        assert (kept.reward, kept.own_reward) == (found.returned, found.own), name
        assert {c.call_id: c.reward for c in await store.calls.of(name) if c.reward is not None} == found.calls
        counted = [r.created_at for r in posted if r.name in rules.weights]
        row = await store.database.one("SELECT rewarded_at FROM rollouts WHERE rollout_id = :r", {"r": name})
        assert row is not None and row["rewarded_at"] == min(counted, default=None)


@pytest.mark.parametrize("seed", range(len(RULES)))
async def test_it_is_the_pure_functions_after_any_history(store: Store, seed: int) -> None:
    do_again(store.database)
    chance, rollouts = random.Random(seed), [f"r{i}" for i in range(5)]
    async with Recorder(store, merged=False) as recorder:
        for rollout, seq in itertools.product(rollouts, range(3)):
            await asked(recorder, rollout, f"{rollout}-{seq}")
            await recorder.end(CallEnd(f"{rollout}-{seq}", rollout, "ok", {}, 200))
    await store.rewards.use(RULES[seed])
    for turn in range(40):
        match chance.random():
            case x if x < 0.05:
                await store.rewards.adopt(chance.choice(RULES))  # what was posted before is stale now
            case x if x < 0.1:
                name = chance.choice(rollouts)
                if (await store.rollouts.get(name)).status == "running":
                    await store.rollouts.end(name, chance.choice(["failed", "completed"]), None)  # type: ignore[arg-type]
            case _:
                some = [chance.choice(rollouts) for _ in range(chance.randint(1, 12))]
                await store.rewards.post([
                    Reward(name, chance.choice(VALUES), chance.choice([None, *(f"{name}-{i}" for i in range(3))]),
                           chance.choice(NAMES), final=False)
                    for name in some
                ])  # fmt: skip
        if turn % 5 == 4:
            await store.rewards.recount()
            await agrees(store, rollouts)


async def test_a_change_of_rules_forgets_no_evaluator(store: Store) -> None:
    await store.rollouts.open([(RolloutName("r"), "hash")], {})
    for value, evidence in ((1.0, True), (2.0, False)):
        await store.rewards.post([Reward("r", value, final=False)], by=Sender("key", evidence=evidence))
    for i in range(10):
        await store.rewards.use(Rules({"reward": 1.0, f"style-{i}": 1.0}))
        assert await store.database.value(float, "SELECT trusted_reward FROM rollouts") == 1.0


def test_a_name_of_weight_0_is_a_reward_of_0_an_unknown_one_is_none_and_sums_are_exact() -> None:
    for posted, returned in (
        ([], None),
        ([Reward("r", 1.0, name="other")], None),
        ([Reward("r", 5.0, name="nothing")], 0.0),
        ([Reward("r", 0.1, name) for name in "abcdefghij"], 1.0),
    ):
        assert earned(posted, Rules({"reward": 1.0, "nothing": 0.0})).returned == returned, posted
