"""Which rollouts a step takes, and what their calls' advantages are: on a real store, without a trainer."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from lightning_proxy.core.records import Choice, Reward, RolloutName
from lightning_proxy.core.tokens import NOT_FOLLOWED
from lightning_proxy.trainer.collect.collector import Collector
from support.rewarded import Traffic, advantages, traffic
from support.sections import TrainerConfig

__all__ = ["traffic"]


async def test_calls_left_out_for_how_they_were_sampled_are_a_share_and_most_of_them_a_line(traffic: Traffic) -> None:
    why = NOT_FOLLOWED + "a thinking budget forces the end of thinking; leave it out of the request"
    for i, reward in enumerate((1.0, 0.0)):
        await traffic.rollout(f"left out {i}", "t", reward, (0.0,) * 2, untrainable_reason=why)
        await traffic.rollout(f"plain {i}", "u", reward)
    batch = await traffic.batch(tasks_per_step=2)
    assert batch is not None
    assert (batch.metrics["calls_not_followed"], batch.metrics["not_followed_share"]) == (4, pytest.approx(2 / 3))
    assert batch.left_out == f"67% of the calls are left out, 4 of them: {why}"
    assert await traffic.dropped("left out 0", "plain 0") == [f"no trainable calls: {why}", None]
    for i, reward in enumerate((1.0, 0.0)):
        await traffic.rollout(f"later {i}", "v", reward)
    later = await traffic.batch()
    assert later is not None
    assert (later.metrics["not_followed_share"], later.left_out) == (0, None)


async def test_rollouts_of_other_models_are_dropped_and_count_in_no_reward(traffic: Traffic) -> None:
    teachers = [await traffic.rollout(f"taught {i}", "both", 1.0, version=None) for i in range(2)]
    own = [await traffic.rollout(f"own {i}", "both", float(i)) for i in range(2)]
    batch = await traffic.batch()
    assert batch is not None
    assert sorted(batch.rollout_ids) == own
    assert (batch.metrics["rollouts"], batch.metrics["reward_mean"]) == (2, 0.5)
    assert set(await traffic.dropped(*teachers)) == {"answered by other models than the policy"}


async def test_a_group_waits_for_its_own_siblings_however_many_other_models_answered(traffic: Traffic) -> None:
    teacher = await traffic.rollout("taught", "t", 1.0, version=None)
    await traffic.rollout("own 0", "t", 0.0)
    await traffic.rollout("failed", "t", None, version=None, status="failed")
    assert await traffic.batch() is None
    assert await traffic.dropped(teacher, "own 0") == [None, None]
    await traffic.rollout("own 1", "t", 1.0)
    batch = await traffic.batch()
    assert batch is not None
    assert sorted(batch.rollout_ids) == ["own 0", "own 1"]
    assert (batch.metrics["groups"], batch.metrics["groups_incomplete"]) == (1, 0)
    assert set(await traffic.dropped(teacher)) == {"answered by other models than the policy"}


async def test_other_models_rewards_are_no_baseline_of_a_rollout_that_is_alone(traffic: Traffic) -> None:
    for i in range(4):
        await traffic.rollout(f"own {i}", "t", 0.0)
        await traffic.rollout(f"taught {i}", "t", 1.0, version=None)
    await traffic.batch()
    await traffic.rollout("alone", "t", 1.0)
    found = await traffic.batch(lone_rollouts="running", group_timeout_s=1e-9)
    assert advantages(found) == {"alone-0": 1.0 - fmean([1.0, 0.0, 0.0, 0.0, 0.0])}


async def test_rewards_of_calls_are_learned_from_where_the_rollouts_own_are_equal(traffic: Traffic) -> None:
    for name, rewards in (("a", (1.0, 0.0)), ("b", (0.0, 0.5))):
        await traffic.rollout(name, "t", 1.0, rewards)
    found = advantages(await traffic.batch(credit="discounted"))
    # Returns [2, 1] and [1.5, 1.5].
    assert found == {"a-0": 0.25, "a-1": -0.25, "b-0": -0.25, "b-1": 0.25}


async def test_a_loss_of_tools_results_takes_such_a_group_where_tools_answered(traffic: Traffic) -> None:
    for i in range(2):
        await traffic.rollout(f"with {i}", "t", 0.0, (0.0, 0.0), tool=True)
        await traffic.rollout(f"without {i}", "u", 0.0)
        await traffic.rollout(f"edited {i}", "v", 0.0, (0.0, 0.0), tool=True, prompt_token_ids=(0, 5))
    batch = await traffic.batch(context_loss="echo", tasks_per_step=3)
    assert batch is not None and sorted(batch.rollout_ids) == ["with 0", "with 1"]
    assert set(advantages(batch).values()) == {0.0}
    assert all(sample.results for sample in batch.samples)
    others = [f"{kind} {i}" for kind in ("without", "edited") for i in range(2)]
    assert set(await traffic.dropped(*others)) == {"all rewards of the group are equal"}


async def test_that_nothing_is_learned_is_said_once_with_what_to_try(
    traffic: Traffic, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(TrainerConfig(group_size=2, tasks_per_step=1), traffic.store)
    for i in range(12):
        await traffic.rollout(f"r{i}", f"t{i // 2}", 1.0)
        assert await collector.next_batch(0) is None
    first, standstill = caplog.messages
    assert first.startswith("no step: nothing to learn from 2 rollouts of mean reward 1")
    assert standstill.startswith("nothing was learned from the newest 6 rollouts (mean reward 1): ")
    assert "trainer.entropy" in standstill
    for i in range(2):
        await traffic.rollout(f"a{i}", "a", float(i))
    assert await collector.next_batch(0) is not None
    for i in range(2):
        await traffic.rollout(f"b{i}", "b", 1.0)
    assert await collector.next_batch(0) is None
    assert caplog.messages[2:] == [first], "and again, after a step"


async def test_with_dynamic_sampling_a_step_waits_for_groups_that_teach_something(traffic: Traffic) -> None:
    config = TrainerConfig(group_size=2, tasks_per_step=2, dynamic_sampling=True, baseline="dr_grpo")
    collector = Collector(config, traffic.store)
    for name, value in (("equal 0", 1.0), ("equal 1", 1.0), ("a0", 0.0), ("a1", 1.0)):
        await traffic.rollout(name, name[:-1], value)
    assert await collector.next_batch(0) is None, "one of the two groups taught nothing"
    assert set(await traffic.dropped("equal 0", "equal 1")) == {"all rewards of the group are equal"}
    assert await traffic.dropped("a0", "a1") == [None, None]
    for i in range(2):
        await traffic.rollout(f"b{i}", "b", float(i))
    batch = await collector.next_batch(0)
    assert batch is not None and set(batch.rollout_ids) == {"a0", "a1", "b0", "b1"}
    assert (batch.metrics["groups"], batch.metrics["groups_equal"], batch.compared) == (3, 1, 4)


async def test_automatic_rewards_add_to_posted_ones(traffic: Traffic) -> None:
    await traffic.rollout("a", "t", 1.0, finish="length")
    await traffic.rollout("b", "t", 1.0)
    batch = await traffic.batch(air={"truncated": -0.5})
    assert advantages(batch) == {"a-0": -0.25, "b-0": 0.25}
    assert batch is not None and batch.metrics["reward_mean"] == 1.0  # what was posted


@pytest.mark.parametrize(("failed", "reward"), [("zero", 0.0), (-1.0, -1.0)])
async def test_failed_rollouts_may_have_a_reward(traffic: Traffic, failed: Any, reward: float) -> None:
    await traffic.rollout("a", "t", 1.0)
    await traffic.rollout("b", "t", None, status="failed")
    await traffic.rollout("c", "t", None, status="discarded")
    batch = await traffic.batch(failed_rollouts=failed)
    mean = fmean([1.0, reward])
    assert advantages(batch) == {"a-0": 1.0 - mean, "b-0": reward - mean}
    assert batch is not None and (batch.metrics["rollouts_failed"], batch.metrics["reward_mean"]) == (1.0, mean)
    assert await traffic.dropped("c") == ["failed or discarded"]


async def test_a_step_that_was_not_finished_gives_back_what_it_dropped_too(traffic: Traffic) -> None:
    for i in range(2):
        await traffic.rollout(f"t{i}", "t", float(i))
        await traffic.rollout(f"equal{i}", "u", 1.0)
    first = await traffic.batch(tasks_per_step=2)
    assert None not in await traffic.dropped("equal0", "equal1")
    assert await traffic.store.steps.release_unfinished() == [1]
    assert await traffic.dropped("equal0", "equal1") == [None, None]
    assert await traffic.batch(tasks_per_step=2) == first
    await traffic.store.steps.trained(1, None, {})
    assert await traffic.store.steps.release_unfinished() == []
    assert None not in await traffic.dropped("equal0", "equal1")


async def test_a_late_sibling_is_compared_with_its_whole_group(traffic: Traffic) -> None:
    await traffic.open("t", "a", "b", "c", "late")
    for name, value in (("a", 0.0), ("b", 0.0), ("c", 0.99)):
        await traffic.rollout(name, "t", value)
    first = await traffic.batch(group_size=4, group_timeout_s=1e-9)  # the mean of three is 0.33
    assert advantages(first) == pytest.approx({"a-0": -0.33, "b-0": -0.33, "c-0": 0.66})
    await traffic.rollout("late", "t", 0.9)
    found = await traffic.batch(group_size=4)
    assert found is not None and found.rollout_ids == ("late",), "only it becomes a row"
    assert advantages(found) == pytest.approx({"late-0": 0.9 - fmean([0.0, 0.0, 0.99, 0.9])})
    assert (found.compared, found.metrics["groups_incomplete"]) == (1, 0.0)


async def test_the_next_group_of_a_task_is_compared_with_itself_alone(traffic: Traffic) -> None:
    await traffic.open("t", "a", "b", "late")
    await traffic.open("t", "next 0", "next 1", "next 2")
    for name, value in (("a", 0.0), ("b", 1.0)):
        await traffic.rollout(name, "t", value)
    assert await traffic.batch(group_size=3, group_timeout_s=1e-9) is not None
    for i, value in enumerate((5.0, 5.0, 8.0)):
        await traffic.rollout(f"next {i}", "t", value)
    await traffic.rollout("late", "t", 2.0)
    found = advantages(await traffic.batch(group_size=3, tasks_per_step=2))
    assert found == pytest.approx({"next 0-0": -1.0, "next 1-0": -1.0, "next 2-0": 2.0, "late-0": 1.0})


@pytest.mark.parametrize("baseline", TrainerConfig.known("baseline"))
async def test_no_baseline_decides_which_rollouts_are_compared(traffic: Traffic, baseline: str) -> None:
    for task, value in (("t", 0.0), ("u", 1.0)):
        for i in range(2):
            await traffic.rollout(f"{task}{i}", task, value)  # within each task they are equal
    found = advantages(await traffic.batch(baseline=baseline, compare="step", tasks_per_step=2))
    assert found.keys() == {"t0-0", "t1-0", "u0-0", "u1-0"} and found["t0-0"] < 0 < found["u0-0"]
    for i in range(4):
        await traffic.rollout(f"v{i}", f"v{i % 2}", float(i % 2))
    assert await traffic.batch(baseline=baseline, tasks_per_step=2) is None
    assert await traffic.dropped("v0", "v1") == ["all rewards of the group are equal"] * 2


async def test_a_step_compares_no_rollouts_that_only_a_teacher_keeps(traffic: Traffic) -> None:
    for name, task, value in (("a", "t", 0.0), ("b", "t", 1.0), ("lone", None, 7.0)):
        await traffic.rollout(name, task, value)
    teacher = {"base_url": "http://127.0.0.1:1/v1"}
    batch = await traffic.batch(baseline="reinforce_pp", compare="step", tasks_per_step=2, teacher=teacher)
    assert advantages(batch) == pytest.approx({"a-0": -1.0, "b-0": 1.0})


async def test_rollouts_without_a_task_are_compared_with_those_before_them(traffic: Traffic) -> None:
    for i in range(4):
        await traffic.rollout(f"before-{i}", None, float(i))
    await traffic.rollout("new", None, 4.0)
    batch = await traffic.batch(lone_rollouts="running", group_size=5)
    # Those that had too few before them to be compared with are not trained on, but count: 0, 1, 2, 3 and 4 itself.
    assert advantages(batch) == {"new-0": 2.0}
    assert batch is not None and batch.metrics["rollouts_lone"] == 5.0
    assert await traffic.dropped("before-0", "before-3") == ["no siblings"] * 2


async def test_a_rollout_alone_in_its_task_is_compared_with_earlier_ones_of_it(traffic: Traffic) -> None:
    for i in range(8):
        await traffic.rollout(f"u{i}", "u", 100.0)
    for i in range(4):
        await traffic.rollout(f"t{i}", "t", float(i % 2))
    await traffic.batch(tasks_per_step=2)  # trains on them
    await traffic.rollout("alone", "t", 3.0)
    found = await traffic.batch(lone_rollouts="running", group_timeout_s=1e-9)
    assert advantages(found) == {"alone-0": 3.0 - fmean([3.0, 0.0, 1.0, 0.0, 1.0])}
    await traffic.rollout("first", "new task", 104.0)
    found = await traffic.batch(lone_rollouts="running", group_timeout_s=1e-9)
    # Nothing of its task: those before it, whatever their task.
    assert advantages(found) == {"first-0": 104.0 - fmean([104.0, 3.0, *[0.0, 1.0] * 2, *[100.0] * 8])}


NOTHING_SAID = {"choices": (Choice(0, (), (), "stop"),), "untrainable_reason": "the answer is empty"}
NO_LOGPROBS = {
    "choices": (Choice(0, (3,), (), "stop"),),
    "untrainable_reason": "no log-probabilities from the upstream",
}
TWO_ANSWERS = {"choices": (Choice(0, (3,), (-1.0,), "stop"), Choice(1, (4,), (-1.0,), "stop"))}


@pytest.mark.parametrize(
    ("end", "counted", "why"),
    [
        pytest.param(NOTHING_SAID, "calls_untrainable", "no trainable calls", id="zero-length answer"),
        pytest.param(NO_LOGPROBS, "calls_untrainable", "no trainable calls", id="no logprobs"),
        pytest.param(TWO_ANSWERS, "calls_ambiguous", "several answers", id="several answers"),
        pytest.param({"prompt_token_ids": tuple(range(60))}, "rows_too_long", "longer than", id="too long a prompt"),
    ],
)
async def test_a_rollout_that_cannot_be_used_costs_the_others_nothing(
    traffic: Traffic, end: dict[str, Any], counted: str, why: str
) -> None:
    await traffic.rollout("a", "t", 1.0)
    await traffic.rollout("b", "t", 0.0)
    await traffic.rollout("bad", "t", 0.5, **end)
    batch = await traffic.batch(group_size=3, max_sample_tokens=50)
    assert advantages(batch) == {"a-0": 0.5, "b-0": -0.5}
    assert batch is not None
    assert (batch.metrics[counted], batch.metrics["rollouts_dropped"], batch.metrics["rollouts_trained"]) == (1, 1, 2)
    (reason,) = await traffic.dropped("bad")
    assert reason is not None and why in reason


async def test_with_dynamic_sampling_a_step_takes_fewer_groups_after_a_time(traffic: Traffic) -> None:
    for name, value in (("equal 0", 1.0), ("equal 1", 1.0), ("a0", 0.0), ("a1", 1.0)):
        await traffic.rollout(name, name[:-1], value)
    config = TrainerConfig(group_size=2, tasks_per_step=2, dynamic_sampling=True, group_timeout_s=1e-9)
    batch = await Collector(config, traffic.store).next_batch(0)
    assert batch is not None and set(batch.rollout_ids) == {"a0", "a1"}


async def test_a_late_sibling_is_compared_with_those_that_taught_nothing_alone(traffic: Traffic) -> None:
    await traffic.open("t", "a", "b", "late")
    for name in ("a", "b"):
        await traffic.rollout(name, "t", 1.0)
    assert await traffic.batch(group_size=3, group_timeout_s=1e-9) is None
    await traffic.rollout("late", "t", 0.0)
    assert advantages(await traffic.batch(group_size=3)) == pytest.approx({"late-0": -2 / 3})


async def test_late_siblings_take_no_place_of_a_group_in_a_step(traffic: Traffic) -> None:
    await traffic.open("t", "a", "b", "late")
    for name, value in (("a", 0.0), ("b", 1.0), ("u0", 0.0), ("u1", 0.0), ("u2", 1.0)):
        await traffic.rollout(name, "u" if name[0] == "u" else "t", value)
    settings = {"group_size": 3, "tasks_per_step": 1, "group_timeout_s": 1e-9}
    assert (await traffic.batch(**settings)) is not None
    await traffic.rollout("late", "t", 3.0)
    for i in range(3):
        await traffic.rollout(f"v{i}", "v", float(i))
    found = await traffic.batch(**{**settings, "tasks_per_step": 2})
    assert found is not None and {"late", "u0", "v0"} <= set(found.rollout_ids)


async def test_by_default_rollouts_without_a_task_wait(traffic: Traffic) -> None:
    for i in range(6):
        await traffic.rollout(str(i), None, float(i))
    assert await traffic.batch() is None
    assert await traffic.dropped("5") == [None]


async def test_rollouts_that_called_no_model_teach_nothing_whatever_their_rewards(traffic: Traffic) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        await traffic.store.rollouts.open([(RolloutName(name, "t"), f"hash of {name}")], {})
        await traffic.post(Reward(name, value))
    assert await traffic.batch() is None
    assert set(await traffic.dropped("a", "b")) == {"no trainable calls"}
