"""The training loop: what a step takes, what it drops, when it begins, and what it reports; its features."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import Reward
from lightning_proxy.trainer.loop import TrainingLoop
from lightning_proxy.trainer.plugins import Run, TrainerHooks, TrainerPlugin, check, open_plugins
from lightning_proxy.trainer.report.metric_schema import METRICS, all_metrics
from lightning_proxy.trainer.types import Batch
from lightning_proxy.trainer.waiting import GuideError
from support.training import Start


async def test_a_step_reports_every_metric_of_the_schema_and_no_other(bench: Start) -> None:
    async with bench(group_timeout_s=0.01, kl_metric=True, entropy={"coef": 0.01}) as b:
        await b.rollout("t1", 1.0)
        await asyncio.sleep(0.02)
        for _ in range(4):
            await b.rollout("t2", 1.0)
        await b.train("t4", "t5")
        metrics = (await b.last()).metrics
        assert {*METRICS, "reward_by_task"} <= set(metrics) <= {*all_metrics(), "reward_by_task"}
        # What was looked at before without a step to make of it counts for this one.
        expected = {
            "groups": 4, "groups_trained": 2, "groups_equal": 1, "groups_incomplete": 1, "rollouts": 13,
            "rollouts_dropped": 5, "reward_mean": pytest.approx(9 / 13), "version": 1, "advantage_positive": 0.5,
            "reward_by_task": metrics["reward_by_task"] | {"t4": {"mean": 0.5, "std": 0.5, "rollouts": 4.0}},
        }  # fmt: skip
        assert {name: metrics[name] for name in expected} == expected
        assert metrics["forward_backward_s"] <= metrics["step_s"]
        assert "reward_by_task" not in (await b.store.versions.get(1)).metrics


async def test_once_takes_what_is_ready_and_goes_on_after_groups_that_teach_nothing(bench: Start) -> None:
    async with bench() as b:
        equal = [await b.rollout(task, 0.5) for task in ("t1", "t2") for _ in range(4)]
        useful = await b.groups("t3")  # fewer groups than a step usually takes
        loop = b.loop()
        await b.train(loop=loop)
        assert {(await b.store.rollouts.get(r)).dropped for r in equal} == {"all rewards of the group are equal"}
        assert await b.steps_of(useful) == {1}
        await b.groups("t4")
        await loop.resume()
        assert not await loop.train_once()  # without `once` it waits for more


async def test_a_warm_ups_first_step_publishes_no_version_and_the_next_one_does(bench: Start) -> None:
    async with bench(lr_scheduler="constant_with_warmup", warmup_steps=2) as b:
        await b.train("t1", "t2")
        first = await b.last()
        assert (first.metrics["lr"], first.version) == (0.0, None)
        await b.train()  # a restart does not publish it either
        assert (await b.live())[0] == 0
        await b.train("t3", "t4")
        assert (await b.live())[:2] == (1, 2)


async def test_a_round_takes_only_what_waited_when_it_began(bench: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with bench(schedule={"when": "rollouts", "every_rollouts": 9}) as b:
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
    bench: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[int]()

    async def away_twice(batch: Batch) -> Batch:
        asked.append(len(batch.samples))
        if len(asked) < 3:
            raise GuideError("teacher: away")
        return batch

    async with bench() as b:
        equal = [await b.rollout("t1", 0.5) for _ in range(4)]
        await b.train(loop=b.loop(partial(TrainingLoop, hooks=TrainerHooks(guide=away_twice))))
        assert await b.steps_of(equal) == {1}
        assert asked == [4, 4, 4] and caplog.text.count("step 1 waits: teacher: away") == 2


async def test_old_siblings_without_a_reward_do_not_end_the_wait_of_new_ones(bench: Start) -> None:
    async with bench(group_timeout_s=30.0) as b:
        old = [await b.rollout("t1", None, status=status) for status in ("completed", "failed")]
        late = [await b.rollout("t2", None, status="completed") for _ in range(4)]
        hour_ago = [{"rollout_id": rollout, "at": time.time() - 3600} for rollout in (*old, *late)]
        await b.store.database.commit([("UPDATE rollouts SET ended_at = :at WHERE rollout_id = :rollout_id", hour_ago)])
        new = await b.rollout("t1", 1.0)
        await b.store.rewards.post([Reward(late[0], 1.0)], None, b"")  # the others' rewards are on their way
        await b.train()
        for waiting in (new, late[0]):
            assert (await b.store.rollouts.get(waiting)).dropped is None


# Features -------------------------------------------------------------------------------------------------------------


async def test_two_features_with_the_same_hook_are_refused_and_are_closed() -> None:
    closed = 0
    anything: Any = object()

    class Guiding(TrainerPlugin):
        @asynccontextmanager
        async def opened(self, core: Any) -> AsyncIterator[TrainerHooks]:
            nonlocal closed
            try:
                yield TrainerHooks(guide=anything)
            finally:
                closed += 1

    with pytest.raises(ConfigError, match="2 features have the trainer's hook guide, but only one may"):
        async with open_plugins([Guiding(Config()), Guiding(Config())], anything):
            pass
    assert closed == 2


def test_a_method_of_fine_tuning_is_refused_under_a_launcher() -> None:
    with pytest.raises(ConfigError, match="--method kto runs in one process: start it without a launcher"):
        check(Config(), Run("kto", launched=True))
    check(Config(), Run(launched=True))


def test_torch_is_not_loaded_to_know_the_methods() -> None:
    """It reads the environment once, which `train` prepares after it has checked the configuration."""
    code = (
        "import sys; from lightning_proxy.core.config.root import Config\n"
        "from lightning_proxy.trainer.plugins import Run, check, methods\n"
        "check(Config(), Run('sft')); print(*methods(), 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["rl", "sft", "dpo", "kto", "False"]
