"""What the monitor finds in a real store, keeps there, and lets go of."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallStart, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer import collapse
from lightning_proxy.trainer.collapse import Monitor
from lightning_proxy.trainer.credit.strategies import JUDGE
from support.sections import TrainerConfig


class Run:
    """A store with steps, versions and rewarded rollouts; `monitor()`: of a trainer that was just started."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.store, self._directory, self._ids = store, directory, itertools.count()
        self.ahead = 60.0

    def monitor(self, **trainer: Any) -> Monitor:
        """Its clock is ahead: whatever was opened has had its time."""
        return Monitor(TrainerConfig.model_validate(trainer), self.store, lambda: time.time() + self.ahead)

    async def committed(self, **metrics: Any) -> int:
        """A step from the live version; its trainer was killed before it was published."""
        step = await self.store.steps.claim([], (await self.store.versions.live()).version)
        await self.store.steps.trained(step, None, {"skipped": 0.0, **metrics})
        return step

    async def step(self, **metrics: Any) -> int:
        """A step from the live version, published; returns its version."""
        step = await self.committed(**metrics)
        version = await self.store.versions.new("merged", step, {})
        await self.store.versions.saved(version, str(self._directory / f"v{version}"), "base")
        await self.store.versions.set_live(version, step, verified=True)
        return version

    async def versions(self, *rewards: Sequence[float]) -> None:
        """Rollouts of the live version with the first rewards for each task, and a step before each further ones."""
        for i, of_version in enumerate(rewards):
            await self.rollouts(await self.step() if i else 0, *of_version)

    async def rollouts(
        self, version: int, *rewards: float, mode: Any = "train", status: str | None = None, judged: float | None = None
    ) -> None:
        """For each of eight tasks. `judged`: what a judge says of the only call, which is what is rewarded."""
        async with Recorder(self.store, merged=True) as recorder:
            for task, reward in itertools.product("abcdefgh", rewards):
                one = f"r{next(self._ids)}"
                name = RolloutName(one, task, None, mode)
                await recorder.start(CallStart(one, name, "chat/completions", "policy", version, {}, time.time()))
                if status is not None:
                    await self.store.rollouts.end(one, status, None)  # type: ignore[arg-type]
                    continue
                await self.store.rewards.post([Reward(one, reward, one)], None, b"")
                if judged is not None:
                    await self.store.rewards.post([Reward(one, judged, one, name=JUDGE, final=False)], None, b"")


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
        yield Run(Store(database), tmp_path)


GOOD, BAD = (1.0,) * 4, (0.0,) * 4  # of each task


async def test_a_version_that_fails_is_found_from_rewards_alone_and_stays_found(run: Run) -> None:
    await run.rollouts(0, 1, 1, 1, 0)
    assert await run.step() == 1
    monitor = run.monitor()
    assert await monitor.look() is None
    await run.rollouts(1, 0, 0, 0, 0)  # no group of these gives a step
    found = await monitor.look()
    assert found is not None and (found.sign, found.go_back_to) == ("reward", 0)
    assert found.story.startswith("the reward fell from 0.75 to 0 with policy version 1 (5.8 sigmas")
    assert "`lightning-proxy policy promote 0`" in found.story
    assert await run.monitor().look() == found == await run.store.steps.collapse()


@pytest.mark.parametrize(("version", "skipped"), [(1, False), (2, False), (2, True)])
async def test_a_version_made_live_by_hand_lets_training_go_on(run: Run, version: int, skipped: bool) -> None:
    await run.versions(GOOD, (1, 1, 1, 0), BAD)
    if skipped:
        await run.committed(skipped=1.0)
    monitor = run.monitor()
    assert 1 in await monitor.keep()
    found = await monitor.look()
    assert found is not None and found.go_back_to == 1
    await run.store.versions.set_live(version)  # 2: it is meant to be so
    assert await monitor.look() is None and await run.store.steps.collapse() is None
    await run.rollouts(version, 0, 0, 0, 0)
    assert await monitor.look() is None, "what was before does not count any more"
    assert await run.step() == 3
    await run.rollouts(3, 0, 0, 0, 0)
    assert await monitor.look() is None
    assert await run.monitor().look() is None


async def test_a_smaller_drop_is_said_once_and_kept_with_the_step(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.versions((1, 1, 0, 0), (1, 0, 0, 0))
    monkeypatch.setattr(collapse, "WARN", 1.9)
    monitor = run.monitor()
    assert await monitor.look() is None
    await run.rollouts(1, 0)
    assert await monitor.look() is None
    metrics = (await run.store.steps.all())[-1].metrics
    assert "collapse" not in metrics
    assert metrics["warnings"]["reward"].startswith("the reward fell from 0.5 to 0.25 with policy version 1")
    assert caplog.text.count("may be collapsing") == 1


@pytest.mark.parametrize("action", ["stop", "rollback", "warn", "off"])
async def test_what_is_done_is_configured(run: Run, action: str) -> None:
    await run.versions(GOOD, BAD)
    assert (await run.monitor(collapse={"action": action}).look() is not None) is (action in ("stop", "rollback"))
    assert ("warnings" in (await run.store.steps.all())[-1].metrics) is (action != "off")


async def test_a_judges_scores_of_what_was_trained_on_do_not_set_versions_apart(run: Run) -> None:
    await run.rollouts(0, 1, 1, 0, 0, judged=1.0)
    await run.step()
    await run.rollouts(1, 1, 1, 0, 0)
    assert await run.monitor(credit="judge", judge={"model": "openai/y"}).look() is None


async def test_evaluations_do_not_count_and_failed_rollouts_as_the_trainer_counts_them(run: Run) -> None:
    await run.versions(GOOD, ())
    await run.rollouts(1, 0, 0, 0, 0, mode="eval")
    await run.rollouts(1, 0, 0, 0, 0, status="failed")
    assert await run.monitor().look() is None
    assert await run.monitor(failed_rollouts="zero").look() is not None


async def test_rollouts_that_fail_sooner_than_others_succeed_are_waited_for(run: Run) -> None:
    await run.versions(GOOD, BAD)
    run.ahead = -30.0  # they were opened less long ago than it took others to be rewarded
    monitor = run.monitor()
    assert await monitor.look() is None
    run.ahead = 60.0
    assert await monitor.look() is not None, "without any new reward"


@pytest.mark.parametrize("action", ["stop", "off"])
async def test_what_can_be_gone_back_to_keeps_its_files_from_the_beginning(run: Run, action: str) -> None:
    for _ in range(20):
        await run.step()
    found = await run.monitor(collapse={"action": action}).keep()
    assert found == ({19, 17, 13, 9} if action == "stop" else set())


async def test_a_step_that_is_not_published_yet_hides_nothing(run: Run) -> None:
    await run.versions(GOOD, GOOD, BAD)
    await run.committed()
    assert await run.monitor().keep() == {0, 1}
    found = await run.monitor().look()
    assert found is not None and (found.sign, found.go_back_to) == ("reward", 1)


async def test_a_step_that_was_overtaken_by_hand_is_not_of_the_line_of_what_is_live(run: Run) -> None:
    await run.versions(GOOD, GOOD)
    await run.committed()
    await run.store.versions.set_live(0)
    await run.rollouts(0, *BAD)
    assert await run.monitor().look() is None


async def test_a_reward_that_falls_little_by_little_is_gone_back_from_while_few_versions_have_files(run: Run) -> None:
    found, monitor = None, run.monitor()
    for version, right in enumerate([8] * 6 + [7, 7, 6, 5, 5, 4]):
        if version:
            await run.step()
            for old in {*range(1, version - 2)} - await monitor.keep():
                await run.store.versions.forget_files(old)
        await run.rollouts(version, *[1.0] * right, *[0.0] * (8 - right))
        found = found or await monitor.look()
    assert found is not None and "with policy version 7" in found.what and found.go_back_to == 5


@pytest.mark.parametrize(
    ("kls", "gone", "back_to"),
    [
        ((0.1, 0.1, 2.0, 2.0), (), 1),  # three in a row, from version 2 on
        ((0.1, 2.0, 2.0), (), 0),  # the first version is out of bounds
        ((0.1, 0.1, 0.1, 2.0, 2.0), (1, 2), 3),  # the base model is not the one before
        ((0.1, 0.1, 0.1, 2.0, 2.0), (1, 2, 3), 4),
        ((0.1, 0.1, 0.1, 2.0, 2.0), (2,), 1),
    ],
)
async def test_a_version_whose_files_are_gone_is_nothing_to_go_back_to(
    run: Run, kls: tuple[float, ...], gone: tuple[int, ...], back_to: int
) -> None:
    for kl in kls:
        await run.step(kl=kl)
    for version in gone:
        await run.store.versions.forget_files(version)
    said = await run.monitor().of_step(len(kls), {"kl": 2.0, "skipped": 0.0})
    assert (said["collapse"]["sign"], said["collapse"]["go_back_to"]) == ("kl", back_to)
    assert said["collapse"]["what"].endswith("is 2, over 1 (3 steps in a row)")


async def test_clipped_sequences_are_no_sign(run: Run) -> None:
    await run.step()
    monitor = run.monitor(loss_type="grpo", importance_level="sequence")
    assert await monitor.of_step(1, {"clip_share": 0.6, "skipped": 0.0}) == {}
