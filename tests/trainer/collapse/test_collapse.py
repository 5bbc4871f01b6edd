"""Signs of collapse, by numbers worked out by hand; how often chance looks like one; what a monitor does, for whom."""

import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.trainer import CollapseConfig
from lightning_proxy.core.records import CallStart, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.rewards import Scored
from lightning_proxy.store.store import Store
from lightning_proxy.trainer import collapse
from lightning_proxy.trainer.collapse import Measured, Monitor, drop, reward_sign, step_signs
from lightning_proxy.trainer.credit.strategies import JUDGE
from support.sections import TrainerConfig

CONFIG = CollapseConfig()
TASKS = ("a", "b", "c", "d", "e", "f", "g", "h")


def scored(version: int, task: str | None, *rewards: float) -> list[Scored]:
    return [Scored(version, task, reward, 0.0, 0.0) for reward in rewards]


def test_rewards_all_equal_on_each_side_are_as_far_apart_as_their_number_says() -> None:
    # 4 + 4 rewards: fallen by 2, variance 2/7, times 4 / 2: the root of 8 - 1. By counting: once in 70.
    found = drop(scored(0, None, 1, 1, 1, 1), scored(1, None, 0, 0, 0, 0))
    assert found.sigmas == pytest.approx(math.sqrt(7))
    assert drop(scored(0, "a", 1, 1), scored(1, "a", 1, 1)).sigmas == 0.0


def test_a_task_of_another_difficulty_is_no_drop_of_the_one_that_both_have() -> None:
    before = [*scored(0, "easy", *[1.0] * 8), *scored(0, "both", 0.0, 1.0)]
    after = [*scored(1, "hard", *[0.0] * 8), *scored(1, "both", 1.0, 0.0)]
    found = drop(before, after)
    assert found.compared == 3, "two of the task that both have, and one mean"
    assert found.sigmas == pytest.approx(0.5 / math.sqrt(1 / 3 + 1 / 4))


@pytest.mark.parametrize("shift", [0.0, -7.0])
def test_a_certain_but_small_drop_is_only_a_warning(shift: float) -> None:
    # 94 % after 100 %: 64 rollouts a version, 8 versions each.
    rewards = [Scored(v, f"t{i // 8}", shift + (v < 8 or i % 16 != 0), 0.0, 0.0) for v in range(16) for i in range(64)]
    line = range(15, -1, -1)
    sign = reward_sign(rewards, line, CONFIG)
    assert sign is not None and "(5." in sign.what and not sign.collapsed
    sign = reward_sign(rewards, line, CollapseConfig(min_drop=0.06))
    assert sign is not None and sign.collapsed


# How often chance looks like a collapse -------------------------------------------------------------------------------

Draw = Callable[[random.Random], float]


def traffic(r: random.Random, draw: Draw, versions: Sequence[int], task: str | None) -> Iterator[Scored]:
    """Of each version four tasks (of one difficulty, if they have no names), some with fewer rollouts."""
    for version in versions:
        for i in range(4):
            name = task and task.format(version, i)
            yield from scored(version, name, *(draw(r) + i * bool(task) for _ in range(r.choice((1, 4, 8)))))


def bernoulli(share: float) -> Draw:
    return lambda r: float(r.random() < share)


@pytest.mark.parametrize("task", ["{0}-{1}", "{1}", None], ids=["each task once", "the same tasks again", "no tasks"])
@pytest.mark.parametrize(
    "draw", [bernoulli(0.03), bernoulli(0.5), bernoulli(0.97), lambda r: r.gauss(0, 1), lambda r: r.paretovariate(1.5)]
)
def test_a_policy_that_does_not_change_looks_collapsed_as_seldom_as_the_sigmas_say(
    task: str | None, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    r, runs, alarms = random.Random(0), 800, 0
    monkeypatch.setattr(collapse, "WARN", 2.0)
    for _ in range(runs):
        versions = range(r.choice((2, 3, 6)))
        alarms += reward_sign([*traffic(r, draw, versions, task)], versions[::-1], CONFIG) is not None
    promised = runs * math.erfc(2 / math.sqrt(2)) / 2  # 18
    assert alarms <= promised + 3 * math.sqrt(promised)


def test_a_drop_is_measured_by_groups_where_their_rollouts_are_alike() -> None:
    # Four rollouts a group, all equal; of eight tasks five fell by 1 and three rose by 1: fallen by 2 * 4 / 2 = 4. By
    # the order of rollouts alone the variance is 8 times that of four 1 and four 0, which is 2/7, times 4 / 2.
    before = [one for i, task in enumerate(TASKS) for one in scored(0, task, *[float(i < 5)] * 4)]
    after = [one for i, task in enumerate(TASKS) for one in scored(1, task, *[float(i >= 5)] * 4)]
    by_order = 4 / math.sqrt(8 * 2 * 2 / 7)
    # By groups: of each task the sum fell or rose by 2, by 0.5 on average. 7 degrees of freedom, and 6 for being few.
    between = math.fsum((2 * side - 0.5) ** 2 for side in [1] * 5 + [-1] * 3) * 13 / 7
    found = drop(before, after)
    assert found.sigmas == pytest.approx(4 / math.sqrt(between)) and found.sigmas < by_order / 2


def learning_run(r: random.Random, spoilt_from: int = 73, alike: float = 0.3) -> Iterator[list[Scored]]:
    """73 versions that learn: 8 of 80 tasks each, 8 rollouts a task, whose correlation within a group is `alike`."""
    difficulty = [r.gauss(0, 1) for _ in range(80)]
    for version in range(73):
        rollouts = []
        for task in r.sample(range(80), 8):
            right = 1 / (1 + math.exp(difficulty[task] + 3 - 6 * min(1.0, version / 44)))
            right = r.betavariate(right * (1 / alike - 1), (1 - right) * (1 / alike - 1))
            right = right if version < spoilt_from else 0.0
            rollouts += scored(version, f"t{task}", *(float(r.random() < right) for _ in range(8)))
        yield rollouts


def signs_in(run: Iterator[list[Scored]]) -> Iterator[tuple[int, Any]]:
    """The sign after each version, with what the monitor looks at: 1,024 rollouts."""
    seen: list[Scored] = []
    for version, rollouts in enumerate(run):
        seen = [*seen, *rollouts][-1024:]
        if version and (sign := reward_sign(seen, range(version, max(-1, version - 16), -1), CONFIG)):
            yield version, sign


def test_ten_healthy_runs_give_at_most_one_false_warning() -> None:
    r = random.Random(0)
    warned = [version for _ in range(10) for version, _ in signs_in(learning_run(r))]
    assert len(warned) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_spoilt_is_stopped_within_two_versions(seed: int) -> None:
    run = learning_run(random.Random(seed), spoilt_from=40)
    stopped = next(version for version, sign in signs_in(run) if sign.collapsed)
    assert stopped in (40, 41)


def steps(name: str, *values: float, **others: float) -> list[Measured]:
    """Newest first; the newest began with version 9."""
    return [Measured(9 - i, {name: value, **others}) for i, value in enumerate(values)]


@pytest.mark.parametrize(("name", "over", "below"), [("clip_share", 0.4, 0.3), ("kl", 1.5, 1.0), ("kl_base", 6.0, 5.0)])
def test_a_metric_over_its_bound_warns_and_after_some_steps_collapses(name: str, over: float, below: float) -> None:
    assert step_signs(steps(name, below, over, over, over), CONFIG) == []
    (once,) = step_signs(steps(name, over, below, over, over), CONFIG)
    assert (once.name, once.since, once.collapsed) == (name, 9, False)
    assert f"is {over:.3g}, over the limit of {below:g} (in the last step)" in once.what
    (again,) = step_signs(steps(name, over, over, over, below), CONFIG)
    assert (again.since, again.collapsed) == (7, True) and "3 steps in a row" in again.what


@pytest.mark.parametrize(("name", "worst"), [("clip_share", 1.0), ("kl", 8.0)])
def test_no_limit_grows_past_what_it_limits(name: str, worst: float) -> None:
    (sign,) = step_signs(steps(name, worst, worst, worst, staleness_mean=4.0), CONFIG)
    assert sign.name == name and sign.collapsed
    set_higher = CollapseConfig(max_kl=20.0)
    assert step_signs(steps("kl", 20.0, staleness_mean=4.0), set_higher) == [], "what is set counts"


def test_a_rare_reward_that_is_lost_is_a_large_drop() -> None:
    found = drop(scored(0, None, 1.0, *[0.0] * 19), scored(1, None, *[0.0] * 20))
    assert (found.before, found.share) == (0.05, 1.0)
    assert drop(scored(0, None, 4.0, 2.0), scored(1, None, 2.0, 2.0)).share == 1.0, "above the lowest that there was"
    assert drop(scored(0, None, 4.0, 2.0), scored(1, None, 1.0, 3.0)).share == 0.5
    assert drop(scored(0, None, 1.0, 1.0), scored(1, None, 1.0, 1.0)).share == 0.0


def test_too_few_to_compare_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "WARN", 0.1)
    few = [*scored(0, None, *[1.0] * 7), *scored(1, None, *[0.0] * 7)]
    assert reward_sign(few, [1, 0], CONFIG) is None
    assert reward_sign([*few, *scored(0, None, 1.0), *scored(1, None, 0.0)], [1, 0], CONFIG) is not None


# The monitor of a store ----------------------------------------------------------------------------------------------


class Run:
    """A store with steps, versions and rewarded rollouts; `monitor()`: of a trainer that was just started."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.store, self._directory, self._ids = store, directory, itertools.count()
        self.ahead = 60.0

    def monitor(self, **trainer: Any) -> Monitor:
        """Its clock is ahead: whatever was opened has had its time."""
        return Monitor(TrainerConfig.model_validate(trainer), self.store, lambda: time.time() + self.ahead)

    async def collapsed(self, **trainer: Any) -> bool:
        return await self.monitor(**trainer).look() is not None

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
    await run.rollouts(1, *BAD)  # no group of these gives a step
    found = await monitor.look()
    assert found is not None and (found.sign, found.go_back_to) == ("reward", 0)
    # Of 1, 1, 1 and five 0 the variance is 15/56, times 4 / 2; fallen by 3 / 2: 12 of 8 tasks, by the root of 30/7.
    what = "the reward fell from 0.75 to 0 with policy version 1 (5.8 sigmas, 32 rollouts or tasks on each side)"
    assert found.story.startswith(what)
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
    await run.rollouts(version, *BAD)
    assert await monitor.look() is None, "what was before does not count any more"
    assert await run.step() == 3
    await run.rollouts(3, *BAD)
    assert await monitor.look() is None
    assert not await run.collapsed()


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


def test_live_traffic_goes_back_unless_told_otherwise_as_users_may_change_their_minds() -> None:
    def action(**section: Any) -> str:
        return TrainerConfig.model_validate(section).collapse.action

    assert action() == action(collapse={"min_drop": 0.5}) == "stop"
    assert action(lone_rollouts="running") == action(lone_rollouts="running", collapse={"min_drop": 0.5}) == "rollback"
    assert action(lone_rollouts="running", collapse={"action": "warn"}) == "warn"
    with pytest.raises(ValidationError, match="collapse"):
        action(lone_rollouts="running", collapse=False)


@pytest.mark.parametrize("action", ["stop", "rollback", "warn", "off"])
async def test_what_is_done_is_configured(run: Run, action: str, caplog: pytest.LogCaptureFixture) -> None:
    await run.versions(GOOD, BAD)
    assert await run.collapsed(collapse={"action": action}) is (action in ("stop", "rollback"))
    assert ("warnings" in (await run.store.steps.all())[-1].metrics) is (action != "off")
    assert ("publishing has stopped" in caplog.text) is (action == "stop")
    assert ("going back to policy version" in caplog.text) is (action == "rollback")


async def test_a_judges_scores_of_what_was_trained_on_do_not_set_versions_apart(run: Run) -> None:
    await run.rollouts(0, 1, 1, 0, 0, judged=1.0)
    await run.step()
    await run.rollouts(1, 1, 1, 0, 0)
    assert not await run.collapsed(credit="judge", judge={"model": "openai/y"})


async def test_evaluations_do_not_count_and_failed_rollouts_as_the_trainer_counts_them(run: Run) -> None:
    await run.versions(GOOD, ())
    await run.rollouts(1, *BAD, mode="eval")
    await run.rollouts(1, *BAD, status="failed")
    assert not await run.collapsed()
    assert await run.collapsed(failed_rollouts="zero")


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


async def test_a_step_that_was_overtaken_by_hand_is_not_of_the_line_of_what_is_live(run: Run) -> None:
    await run.versions(GOOD, GOOD)
    await run.committed()
    await run.store.versions.set_live(0)
    await run.rollouts(0, *BAD)
    assert not await run.collapsed()


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
    assert said["collapse"]["what"].endswith("is 2, over the limit of 1 (3 steps in a row)")


async def test_clipped_sequences_are_no_sign(run: Run) -> None:
    await run.step()
    monitor = run.monitor(loss_type="grpo", importance_level="sequence")
    assert await monitor.of_step(1, {"clip_share": 0.6, "skipped": 0.0}) == {}


# Whose rewards stop training: an own-scoped key's never, a plain key's until an evaluator has rewarded ----------------

RIGHT, WRONG = [1.0] * 30, [0.0] * 14


class Tenants(Run):
    """A run whose rollouts keys of a proxy open and reward."""

    def __init__(self, system: Any, store: Store) -> None:
        super().__init__(store, system.vllm.root)
        self.system = system

    async def rewarded(self, key: dict[str, str], version: int, rewards: list[float], n: int = 0) -> list[str]:
        """Rollouts that a key opened and rewards."""
        opened = await self.system.post("/rollouts", {"task_id": "t", "n": n or len(rewards)}, **key)
        ids = [one["rollout_id"] for one in opened]
        begun = "UPDATE rollouts SET policy_version = :version WHERE rollout_id = :rollout_id"
        await self.store.database.commit([(begun, [{"version": version, "rollout_id": one} for one in ids])])
        if rewards:
            await self.reward(key, ids, rewards)
        return ids

    async def reward(self, key: dict[str, str], ids: list[str], rewards: list[float]) -> None:
        bodies = [{"rollout_id": one, "reward": value} for one, value in zip(ids, rewards, strict=True)]
        await self.system.post("/reward", bodies, **key)

    async def told(self, key: dict[str, str]) -> Any:
        return (await self.system.get("/status", **key))["uncounted"]


@pytest.fixture
async def tenants(start: Any) -> AsyncIterator[Tenants]:
    async with start() as system, system.store() as store:
        yield Tenants(system, store)


async def test_an_own_key_stops_nobody_and_status_says_what_does_not_count(tenants: Tenants) -> None:
    own, plain = await tenants.system.key("own", scope="own"), await tenants.system.key("plain")
    assert await tenants.told(plain) is None, "there are no rewards"
    await tenants.rewarded(own, 0, RIGHT)
    await tenants.step()
    await tenants.rewarded(own, 1, WRONG)
    assert not await tenants.collapsed()
    told = await tenants.told(plain)
    assert (told["rewards"], await tenants.told(own)) == (44, None)
    assert "`keys create NAME --evaluator`" in told["story"]
    await tenants.rewarded(plain, 0, RIGHT)
    assert await tenants.told(plain) is None
    await tenants.rewarded(plain, 1, WRONG)
    assert await tenants.collapsed()


async def test_an_own_key_with_evaluator_counts(tenants: Tenants) -> None:
    own = await tenants.system.key("own", scope="own", evaluator=True)
    await tenants.rewarded(own, 0, RIGHT)
    await tenants.step()
    await tenants.rewarded(own, 1, WRONG)
    assert await tenants.collapsed()


async def test_plain_keys_count_until_an_evaluator_has_rewarded(tenants: Tenants) -> None:
    plain, judge = await tenants.system.key("plain"), await tenants.system.key("judge", evaluator=True)
    judged = [await tenants.rewarded(plain, 0, RIGHT)]
    await tenants.step()
    judged += [await tenants.rewarded(plain, 1, WRONG)]
    await tenants.rewarded(judge, 0, [1.0])
    assert not await tenants.collapsed()
    await tenants.rewarded(judge, 0, RIGHT)
    mine = await tenants.rewarded(judge, 1, [1.0] * 14)
    await tenants.reward(plain, mine, WRONG)
    assert not await tenants.collapsed(), "a plain key's newer rewards change nothing"
    assert [(await tenants.store.rollouts.get(one)).reward for one in mine] == WRONG, "but they are trained on"
    for ids, rewards in zip(judged, (RIGHT, WRONG), strict=True):
        await tenants.reward(judge, ids, rewards)
    await tenants.reward(judge, mine, WRONG)
    assert await tenants.collapsed()


async def test_rollouts_that_an_own_key_fails_or_opens_hide_and_stop_nothing(tenants: Tenants) -> None:
    own, judge = await tenants.system.key("own", scope="own"), await tenants.system.key("judge", evaluator=True)
    await tenants.rewarded(judge, 0, RIGHT)
    await tenants.step()
    await tenants.rewarded(judge, 1, [1.0] * 14)
    for name in await tenants.rewarded(own, 1, [], n=14):
        await tenants.system.post(f"/rollouts/{name}/end", {"status": "failed"}, **own)
    assert not await tenants.collapsed(failed_rollouts="zero")
    await tenants.rewarded(judge, 1, [0.0] * 30)
    for _ in range(2):
        await tenants.rewarded(own, 1, [], n=1000)
    assert await tenants.collapsed()


async def test_keys_that_are_made_later_leave_what_was_rewarded_without_one(tenants: Tenants) -> None:
    await tenants.rewarded({}, 0, RIGHT)
    await tenants.step()
    assert not await tenants.collapsed()
    plain, own = await tenants.system.key("plain"), await tenants.system.key("own", scope="own")
    await tenants.rewarded(own, 1, WRONG)
    assert not await tenants.collapsed()
    await tenants.rewarded(plain, 1, WRONG)
    assert await tenants.collapsed()
