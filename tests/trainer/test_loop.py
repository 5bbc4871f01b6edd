"""The training loop: what a step takes, what it drops, when it begins, and what it reports."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from lightning_proxy.core.records import Choice, Reward
from lightning_proxy.trainer.loop import TrainingLoop
from lightning_proxy.trainer.plugins import TrainerHooks
from lightning_proxy.trainer.report.metric_schema import METRICS, all_metrics
from lightning_proxy.trainer.types import Batch
from lightning_proxy.trainer.waiting import GuideError
from support.models import VOCABULARY
from support.training import bench


async def test_a_step_reports_every_metric_of_the_schema_and_no_other(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, group_timeout_s=0.01, kl_metric=True, entropy={"coef": 0.01}) as b:
        await b.rollout("t1", 1.0)
        await asyncio.sleep(0.02)
        equal = [await b.rollout("t2", 1.0) for _ in range(4)]
        await b.groups("t4", "t5")
        await b.loop().run(asyncio.Event(), once=True)
        step = await b.store.steps.last()
        assert step is not None
        assert {*METRICS, "reward_by_task"} <= set(step.metrics) <= {*all_metrics(), "reward_by_task"}
        # What was looked at before without a step to make of it counts for this one.
        assert step.metrics["groups"] == 4 and step.metrics["groups_trained"] == 2
        assert step.metrics["groups_equal"] == 1 and step.metrics["groups_incomplete"] == 1
        assert step.metrics["rollouts"] == 13 and step.metrics["rollouts_dropped"] == len(equal) + 1
        assert step.metrics["reward_mean"] == pytest.approx((1 + 4 + 4) / 13)
        assert step.metrics["reward_by_task"]["t4"] == {"mean": 0.5, "std": 0.5, "rollouts": 4.0}
        assert (step.metrics["version"], step.metrics["advantage_positive"]) == (1, 0.5)
        assert step.metrics["forward_backward_s"] <= step.metrics["step_s"]
        assert "reward_by_task" not in (await b.store.versions.get(1)).metrics


async def test_once_takes_what_is_ready_and_goes_on_after_groups_that_teach_nothing(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        equal = [await b.rollout(task, 0.5) for task in ("t1", "t2") for _ in range(4)]
        useful = await b.groups("t3")  # fewer groups than a step usually takes
        loop = b.loop()
        await loop.run(asyncio.Event(), once=True)
        assert {(await b.store.rollouts.get(r)).dropped for r in equal} == {"all rewards of the group are equal"}
        assert await b.steps_of(useful) == {1}
        alone = await b.groups("t4")
        await loop.resume()
        assert not await loop.train_once()  # without `once` it waits for more
        assert await b.steps_of(alone) == {None}


async def test_tokens_of_another_tokenizer_end_no_step(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1")
        for i in range(4):
            other = await b.record("t2", Choice(0, (VOCABULARY,) * i + (3,), (-1.0,) * (i + 1), "stop"), 0)
            await b.store.rewards.post([Reward(other, float(i))], None, b"")
        await b.loop().run(asyncio.Event(), once=True)
        step = await b.store.steps.last()
        assert step is not None
        assert (step.metrics["calls"], step.metrics["calls_other_tokens"], step.metrics["skipped"]) == (5, 3, 0)
        assert "not the model's tokens" in str((await b.store.rollouts.get(other)).dropped)


async def test_a_warm_ups_first_step_publishes_no_version_and_the_next_one_does(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, lr_scheduler="constant_with_warmup", warmup_steps=2) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        first = await b.store.steps.last()
        assert first is not None and (first.metrics["lr"], first.version) == (0.0, None)
        await b.loop().run(asyncio.Event(), once=True)  # a restart does not publish it either
        assert (await b.store.versions.live()).version == 0
        await b.groups("t3", "t4")
        await b.loop().run(asyncio.Event(), once=True)
        live = await b.store.versions.live()
        assert (live.version, live.step) == (1, 2)


async def test_agents_go_on_while_a_step_is_computed_and_what_they_do_is_the_next_steps(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        first = await b.groups("t1", "t2")
        loop = b.loop()
        computing, go_on, whole = threading.Event(), threading.Event(), b.trainer.forward_backward

        def held(batch: Batch) -> None:
            computing.set()
            assert go_on.wait(30)
            whole(batch)

        monkeypatch.setattr(b.trainer, "forward_backward", held)
        training = asyncio.create_task(loop.run(asyncio.Event(), once=True))
        while not computing.is_set():
            await asyncio.sleep(0.01)
        second = await b.groups("t3", "t4")  # recorded and rewarded meanwhile
        assert not training.done()
        go_on.set()
        await training
        assert await b.steps_of(first) == {1}
        assert await b.steps_of(second) == {2}


async def test_a_round_takes_nothing_that_did_not_wait_when_it_began(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with bench(base, tmp_path, schedule={"when": "rollouts", "every_rollouts": 9}) as b:
        await b.groups("t1", "t2")
        loop = b.loop()
        await loop.resume()
        assert not await loop._train_when_due(once=False), "enough for a step, and not for a round"
        assert "the trainer waits for 9 complete rollouts, 8 so far" in caplog.text
        await b.rollout("t0", 1.0)  # its siblings are still running, which keeps the round open
        assert [await loop._train_when_due(once=False) for _ in range(2)] == [True, False]
        late = await b.groups("t3")
        assert not await loop._train_when_due(once=False), "5 of 9 wait"
        assert await b.steps_of(late) == {None}
        late += await b.groups("t4")
        assert await loop._train_when_due(once=False), "enough for another round"
        assert await b.steps_of(late) == {2}


async def test_a_step_waits_for_its_guide_and_takes_what_the_guide_teaches(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    asked = list[int]()

    async def away_twice(batch: Batch) -> Batch:
        asked.append(len(batch.samples))
        if len(asked) < 3:
            raise GuideError("teacher: away")
        return batch

    async with bench(base, tmp_path) as b:
        equal = [await b.rollout("t1", 0.5) for _ in range(4)]
        await b.loop(partial(TrainingLoop, hooks=TrainerHooks(guide=away_twice))).run(asyncio.Event(), once=True)
        assert await b.steps_of(equal) == {1}
        assert asked == [4, 4, 4] and caplog.text.count("step 1 waits: teacher: away") == 2


async def test_what_is_too_old_is_dropped_with_a_reason(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, max_staleness=0) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        stale = await b.groups("t3", "t4")
        await b.loop().run(asyncio.Event(), once=True)
        reasons = {(await b.store.rollouts.get(rollout)).dropped for rollout in stale}
        assert reasons == {"stale: sampled by too old a policy version"}


async def test_old_siblings_without_a_reward_do_not_end_the_wait_of_new_ones(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, group_timeout_s=30.0) as b:
        old = [await b.rollout("t1", None, status=status) for status in ("completed", "failed")]
        late = [await b.rollout("t2", None, status="completed") for _ in range(4)]
        hour_ago = [{"rollout_id": rollout, "at": time.time() - 3600} for rollout in (*old, *late)]
        await b.store.database.commit([("UPDATE rollouts SET ended_at = :at WHERE rollout_id = :rollout_id", hour_ago)])
        new = await b.rollout("t1", 1.0)
        await b.store.rewards.post([Reward(late[0], 1.0)], None, b"")  # the others' rewards are on their way
        await b.loop().run(asyncio.Event(), once=True)
        for waiting in (new, late[0]):
            assert (await b.store.rollouts.get(waiting)).dropped is None
