"""Under a gate, training goes on while its versions are tested one at a time, and back if one is rejected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, PublishError
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.serving import mode
from lightning_proxy.serving.mode import decide as decide_how
from lightning_proxy.serving.swap import Swap
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url
from support.training import Bench, DeafServer, HonestServer, bench, require_seen_clearly


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_proxy.serving.swap.LEAVE_S", 0.01)
    monkeypatch.setattr("lightning_proxy.serving.swap.DRAIN_POLL_S", 0.01)


@pytest.fixture
async def b(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    """A trainer behind a gate."""
    publish = getattr(request, "param", "lora")
    replicas = [HonestServer] if publish == "merged" else []
    async with bench(base, tmp_path, publish, replicas=replicas, policy={"promotion": "gated"}) as b:
        yield b


BOTH_WAYS = pytest.mark.parametrize("b", ["lora", "merged"], indirect=True)


async def go(loop: Any) -> Any:
    await loop.run(asyncio.Event(), once=True)
    return loop


async def step(b: Bench, loop: Any = None) -> Any:
    """One step of a trainer that goes on; a new one without `loop`."""
    number = len(await b.store.steps.all())
    await b.groups(f"t{number}a", f"t{number}b")
    return await go(loop or b.loop())


async def statuses(b: Bench) -> Any:
    return {v.version: v.status for v in await b.store.versions.all()}


async def under_test(b: Bench) -> Any:
    return await Promotions(b.store.database).now()


async def decide(b: Bench, outcome: Any) -> None:
    trial = await under_test(b)
    assert await Promotions(b.store.database).decide(trial.promotion, outcome, "as the test says", {"pairs": 7})


@BOTH_WAYS
async def test_training_goes_on_beside_a_test_and_the_newest_weights_are_tested_next(b: Bench) -> None:
    loop = await step(b)
    assert await statuses(b) == {0: "live", 1: "candidate"}
    trial = await under_test(b)
    assert (trial.promotion.version, trial.promotion.against, trial.candidate.verified) == (1, 0, True)
    await require_seen_clearly(b.store, 1)
    labels = [server.label.split("-")[0] for server in (b.server, *b.replicas)]
    assert "policy-v1" in b.server.models if b.mode == "lora" else labels == ["default", "1"]
    await step(b, loop)
    await step(b, loop)
    assert await steps(b) == [(0, 1), (1, None), (1, None)], "training goes on"
    await decide(b, "promoted")
    await go(loop)
    assert await statuses(b) == {0: "ready", 1: "live", 2: "candidate"}
    assert (await steps(b), loop.base) == ([(0, 1), (1, None), (1, 2)], 2)
    await require_seen_clearly(b.store, 2)
    await step(b, loop)
    assert (await steps(b))[3] == (2, None)
    if b.mode == "merged":
        assert b.replicas[0].label.startswith("2-")


async def steps(b: Bench) -> Any:
    """The version that each step began with, and the one that it made."""
    return [(one.base, one.version) for one in await b.store.steps.all()]


@BOTH_WAYS
async def test_after_a_rejection_training_goes_on_from_the_live_version(b: Bench) -> None:
    loop = await step(b)
    await step(b, loop)
    await decide(b, "rejected")
    assert (await b.store.versions.get(1)).error == "as the test says"
    await go(loop)
    assert (await statuses(b), loop.base) == ({0: "live", 1: "rejected"}, 0), "what was trained on from it is gone"
    await step(b, loop)
    assert (await statuses(b))[2] == "candidate"
    assert await steps(b) == [(0, 1), (1, None), (0, 2)]


async def test_a_trainer_that_is_started_again_goes_on_from_what_is_tested(b: Bench) -> None:
    await step(b, await step(b))
    assert (await go(b.loop())).base == 1
    assert await statuses(b) == {0: "live", 1: "candidate"}
    await decide(b, "promoted")
    assert (await go(b.loop())).base == 2
    assert await statuses(b) == {0: "ready", 1: "live", 2: "candidate"}
    await decide(b, "rejected")
    assert (await go(b.loop())).base == 1


async def test_a_version_that_was_being_saved_when_the_trainer_was_killed_is_saved_again(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Promotions, "begin", killed)
        with pytest.raises(KeyboardInterrupt):
            await step(b)
    assert await statuses(b) == {0: "live", 1: "publishing"}
    await go(b.loop())
    assert await statuses(b) == {0: "live", 1: "failed", 2: "candidate"}


async def test_a_version_made_live_by_hand_ends_the_test_and_training_goes_on_from_it(b: Bench) -> None:
    loop = await step(b)
    await decide(b, "promoted")
    await step(b, loop)
    await step(b, loop)
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


async def test_training_waits_where_it_is_too_far_ahead_of_what_is_live(b: Bench) -> None:
    loop = await step(b, b.loop(max_staleness=1))
    await step(b, loop)
    rollouts = await b.groups("x", "y")
    assert not await loop._train_when_due(once=True)
    assert await b.steps_of(rollouts) == {None}
    await decide(b, "rejected")
    await go(loop)
    assert await b.steps_of(rollouts) == {3}, "they are of the version that training goes on from"


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_weights_that_are_not_served_are_never_tested(base: Path, tmp_path: Path, publish: str) -> None:
    replicas = [DeafServer] if publish == "merged" else []
    server = HonestServer if publish == "merged" else DeafServer
    async with bench(base, tmp_path, publish, server, replicas=replicas, policy={"promotion": "gated"}) as b:
        with pytest.raises(PublishError, match="does not serve the weights"):
            await step(b)
        assert await statuses(b) == {0: "live", 1: "failed"}
        assert await under_test(b) is None
        assert [server.label.split("-")[0] for server in b.replicas] in ([], ["0"])


# What a gate cannot do is refused

ONE = [{"name": "policy", "base_url": "http://127.0.0.1:1/v1"}]
TWO = [ONE[0] | {"replicas": ["http://127.0.0.1:2/v1"]}]
GATED = {"promotion": {"mode": "gated"}}


async def test_where_the_machine_decides_how_to_publish_the_trainer_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode, "has_gpu", lambda: False)
    settings = {"store": {"url": store_url(tmp_path)}, **GATED}
    one, two = (Config.model_validate(settings | {"upstreams": upstreams}) for upstreams in (ONE, TWO))
    async with opened(one.store) as database:
        with pytest.raises(ConfigError, match="needs a second server"):
            await decide_how(one, Store(database), "trainer")
        assert await decide_how(two, Store(database), "trainer") == "merged"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": {"publish": "merged"}, "upstreams": ONE, **GATED}, "gated needs a second server if weights"),
        ({"policy": {"publish": "lora", "pin_rollouts": False}, **GATED}, "it needs policy.pin_rollouts"),
        ({"promotion": {"reward_range": [1, 0]}}, "the lowest and the highest reward"),
        ({"promotion": {"share": 0.6}}, "less than or equal to 0.5"),
        ({"promotion": {"metrics": {}}}, "at least 1 item"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config.model_validate(settings)
