"""Under a gate, training goes on while its versions are tested one at a time, and back if one is rejected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.errors import PublishError
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.serving.swap import Swap
from support.training import Bench, DeafServer, HonestServer, bench, require_seen_clearly


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_proxy.serving.swap.LEAVE_S", 0.01)
    monkeypatch.setattr("lightning_proxy.serving.swap.DRAIN_POLL_S", 0.01)


@asynccontextmanager
async def behind_a_gate(base: Path, tmp_path: Path, publish: str = "lora", **trainer: Any) -> AsyncIterator[Bench]:
    replicas = [HonestServer] if publish == "merged" else []
    async with bench(base, tmp_path, publish, replicas=replicas, policy={"promotion": "gated"}, **trainer) as b:
        yield b


async def step(b: Bench, loop: Any, **trainer: Any) -> Any:
    """One step of a trainer that goes on; a new one without `loop`."""
    number = len(await b.store.steps.all())
    await b.groups(f"t{number}a", f"t{number}b")
    loop = loop or b.loop(**trainer)
    await loop.run(asyncio.Event(), once=True)
    return loop


async def statuses(b: Bench) -> dict[int, str]:
    return {v.version: v.status for v in await b.store.versions.all()}


async def decide(b: Bench, outcome: Any) -> None:
    trial = await Promotions(b.store.database).now()
    assert trial is not None
    assert await Promotions(b.store.database).decide(trial.promotion, outcome, "as the test says", {"pairs": 7})


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_training_goes_on_beside_a_test_and_the_newest_weights_are_tested_next(
    base: Path, tmp_path: Path, publish: str
) -> None:
    async with behind_a_gate(base, tmp_path, publish) as b:
        loop = await step(b, None)
        candidate, trial = await b.store.versions.get(1), await Promotions(b.store.database).now()
        assert (await statuses(b), candidate.verified) == ({0: "live", 1: "candidate"}, True), "served, and not live"
        assert trial is not None
        assert (trial.promotion.version, trial.promotion.against, trial.candidate) == (1, 0, candidate)
        await require_seen_clearly(b.store, 1)
        labels = [server.label.split("-")[0] for server in (b.server, *b.replicas)]
        assert "policy-v1" in b.server.models if publish == "lora" else labels == ["default", "1"]
        await step(b, loop)
        await step(b, loop)
        assert await statuses(b) == {0: "live", 1: "candidate"}
        assert await steps(b) == [(0, 1), (1, None), (1, None)], "training goes on"
        await decide(b, "promoted")
        await loop.run(asyncio.Event(), once=True)
        assert await statuses(b) == {0: "ready", 1: "live", 2: "candidate"}
        assert (await steps(b), loop.base) == ([(0, 1), (1, None), (1, 2)], 2)
        await require_seen_clearly(b.store, 2)
        await step(b, loop)
        assert (await steps(b))[3] == (2, None)
        if publish == "merged":
            assert b.replicas[0].label.startswith("2-")


async def steps(b: Bench) -> list[tuple[int, int | None]]:
    """The version that each step began with, and the one that it made."""
    return [(one.base, one.version) for one in await b.store.steps.all()]


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_after_a_rejection_training_goes_on_from_the_live_version(
    base: Path, tmp_path: Path, publish: str
) -> None:
    async with behind_a_gate(base, tmp_path, publish) as b:
        loop = await step(b, None)
        await step(b, loop)
        await decide(b, "rejected")
        assert await statuses(b) == {0: "live", 1: "rejected"}
        assert (await b.store.versions.get(1)).error == "as the test says"
        await loop.run(asyncio.Event(), once=True)
        assert (await statuses(b), loop.base) == ({0: "live", 1: "rejected"}, 0), "what was trained on from it is gone"
        await step(b, loop)
        assert await statuses(b) == {0: "live", 1: "rejected", 2: "candidate"}
        assert await steps(b) == [(0, 1), (1, None), (0, 2)]


async def test_a_trainer_that_is_started_again_goes_on_from_what_is_tested(base: Path, tmp_path: Path) -> None:
    async with behind_a_gate(base, tmp_path) as b:
        await step(b, await step(b, None))
        loop = b.loop()
        await loop.run(asyncio.Event(), once=True)
        assert (await statuses(b), loop.base) == ({0: "live", 1: "candidate"}, 1)
        await decide(b, "promoted")
        again = b.loop()
        await again.run(asyncio.Event(), once=True)
        assert (await statuses(b), again.base) == ({0: "ready", 1: "live", 2: "candidate"}, 2)
        await decide(b, "rejected")
        last = b.loop()
        await last.run(asyncio.Event(), once=True)
        assert last.base == 1


async def test_a_version_that_was_being_saved_when_the_trainer_was_killed_is_saved_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    async with behind_a_gate(base, tmp_path) as b:
        with monkeypatch.context() as patched:
            patched.setattr(Promotions, "begin", killed)
            with pytest.raises(KeyboardInterrupt):
                await step(b, None)
        assert await statuses(b) == {0: "live", 1: "publishing"}
        await b.loop().run(asyncio.Event(), once=True)
        assert await statuses(b) == {0: "live", 1: "failed", 2: "candidate"}


async def test_a_version_made_live_by_hand_ends_the_test_and_training_goes_on_from_it(
    base: Path, tmp_path: Path
) -> None:
    async with behind_a_gate(base, tmp_path) as b:
        loop = await step(b, None)
        await decide(b, "promoted")
        await step(b, loop)
        await step(b, loop)
        assert await statuses(b) == {0: "ready", 1: "live", 2: "candidate"}
        swap = Swap(b.store, b.vllm, "lora", b.config.policy.directory)
        await swap.promote(0)
        assert await statuses(b) == {0: "live", 1: "ready", 2: "ready"}
        test = (await Promotions(b.store.database).last())[2]
        assert (test.status, test.reason) == ("ended", "version 0 was made live during the test")
        await step(b, loop)
        assert (await steps(b))[-1] == (0, 3)
        assert await statuses(b) == {0: "live", 1: "ready", 2: "ready", 3: "candidate"}
        await decide(b, "rejected")
        assert (await swap.promote(1)).version == 1
        assert (await swap.rollback()).version == 0, "not a version that was never live"


async def test_training_waits_where_it_is_too_far_ahead_of_what_is_live(base: Path, tmp_path: Path) -> None:
    async with behind_a_gate(base, tmp_path, max_staleness=1) as b:
        loop = await step(b, None)
        await step(b, loop)
        rollouts = await b.groups("x", "y")
        assert not await loop._train_when_due(once=True)
        assert await b.steps_of(rollouts) == {None}
        await decide(b, "rejected")
        await loop.run(asyncio.Event(), once=True)
        assert await b.steps_of(rollouts) == {3}, "they are of the version that training goes on from"


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_weights_that_are_not_served_are_never_tested(base: Path, tmp_path: Path, publish: str) -> None:
    replicas = [DeafServer] if publish == "merged" else []
    server = HonestServer if publish == "merged" else DeafServer
    async with bench(base, tmp_path, publish, server, replicas=replicas, policy={"promotion": "gated"}) as b:
        with pytest.raises(PublishError, match="does not serve the weights"):
            await step(b, None)
        assert await statuses(b) == {0: "live", 1: "failed"}
        assert await Promotions(b.store.database).now() is None
        assert [server.label.split("-")[0] for server in b.replicas] in ([], ["0"])
