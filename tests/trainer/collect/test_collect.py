"""Which rollouts a step takes, and what their calls' advantages are: on a real store, without a trainer."""

import logging
from statistics import fmean
from typing import Any

import pytest

from lightning_proxy.core.records import Choice, Reward, RolloutName
from support.rewarded import Traffic, advantages
from support.sections import TrainerConfig

EQUAL = "all rewards of the group are equal"
AT_ONCE = {"group_timeout_s": 1e-9}


async def test_a_group_waits_for_its_own_siblings_and_no_reward_of_other_models_counts(traffic: Traffic) -> None:
    await traffic.rollouts("t", {"taught 0": 1.0, "taught 1": 1.0}, version=None)
    await traffic.rollout("own 0", "t", 0.0)
    await traffic.rollout("failed", "t", None, version=None, status="failed")
    assert await traffic.batch() is None
    assert await traffic.dropped("taught 0", "own 0") == [None, None]
    await traffic.rollout("own 1", "t", 1.0)
    batch = await traffic.taken()
    assert sorted(batch.rollout_ids) == ["own 0", "own 1"]
    expected = {"groups": 1, "groups_incomplete": 0, "rollouts": 2, "reward_mean": 0.5}
    assert {name: batch.metrics[name] for name in expected} == expected
    assert set(await traffic.dropped("taught 0", "taught 1")) == {"answered by other models than the policy"}


async def test_rewards_of_calls_are_learned_from_where_the_rollouts_own_are_equal(traffic: Traffic) -> None:
    for name, rewards in (("a", (1.0, 0.0)), ("b", (0.0, 0.5))):
        await traffic.rollout(name, "t", 1.0, rewards)
    found = advantages(await traffic.batch(credit="discounted"))
    # Returns [2, 1] and [1.5, 1.5].
    assert found == {"a-0": 0.25, "a-1": -0.25, "b-0": -0.25, "b-1": 0.25}


async def test_a_loss_of_tools_results_takes_such_a_group_where_tools_answered(traffic: Traffic) -> None:
    twice: dict[str, Any] = {"calls": (0.0, 0.0), "tool": True}
    await traffic.rollouts("t", {"with 0": 0.0, "with 1": 0.0}, **twice)
    await traffic.rollouts("u", {"without 0": 0.0, "without 1": 0.0})
    await traffic.rollouts("v", {"edited 0": 0.0, "edited 1": 0.0}, **twice, prompt_token_ids=(0, 5))
    batch = await traffic.taken(context_loss="echo", tasks_per_step=3)
    assert sorted(batch.rollout_ids) == ["with 0", "with 1"]
    assert set(advantages(batch).values()) == {0.0}
    assert all(sample.results for sample in batch.samples)
    assert set(await traffic.dropped("without 0", "without 1", "edited 0", "edited 1")) == {EQUAL}


async def test_that_nothing_is_learned_is_said_with_advice(traffic: Traffic, caplog: pytest.LogCaptureFixture) -> None:
    collector = traffic.collector()
    for i in range(12):
        await traffic.rollout(f"r{i}", f"t{i // 2}", 1.0)
        assert await collector.next_batch(0) is None
    first, standstill = caplog.messages
    assert first.startswith("nothing can be learned from 2 rollouts of mean reward 1")
    assert standstill.startswith("nothing was learned from the newest 6 rollouts (mean reward 1): ")
    assert "trainer.entropy" in standstill


async def test_with_dynamic_sampling_a_step_waits_for_groups_that_teach_something(traffic: Traffic) -> None:
    collector = traffic.collector(tasks_per_step=2, dynamic_sampling=True)
    await traffic.rollouts("e", {"equal 0": 1.0, "equal 1": 1.0})
    await traffic.rollouts("a", {"a0": 0.0, "a1": 1.0})
    assert await collector.next_batch(0) is None, "one of the two groups taught nothing"
    assert await traffic.dropped("equal 0", "equal 1", "a0", "a1") == [EQUAL, EQUAL, None, None]
    await traffic.rollouts("b", {"b0": 0.0, "b1": 1.0})
    batch = await collector.next_batch(0)
    assert batch is not None and set(batch.rollout_ids) == {"a0", "a1", "b0", "b1"}
    assert (batch.metrics["groups"], batch.metrics["groups_equal"], batch.compared) == (3, 1, 4)


async def test_automatic_rewards_add_to_posted_ones(traffic: Traffic) -> None:
    await traffic.rollout("a", "t", 1.0, finish="length")
    await traffic.rollout("b", "t", 1.0)
    batch = await traffic.taken(air={"truncated": -0.5})
    assert advantages(batch) == {"a-0": -0.25, "b-0": 0.25}
    assert batch.metrics["reward_mean"] == 1.0  # what was posted


async def test_failed_rollouts_may_have_a_reward(traffic: Traffic) -> None:
    await traffic.rollout("a", "t", 1.0)
    await traffic.rollout("b", "t", None, status="failed")
    await traffic.rollout("c", "t", None, status="discarded")
    batch = await traffic.taken(failed_rollouts=-0.5)
    assert advantages(batch) == {"a-0": 0.75, "b-0": -0.75}
    assert (batch.metrics["rollouts_failed"], batch.metrics["reward_mean"]) == (1.0, 0.25)
    assert await traffic.dropped("c") == ["failed or discarded"]


async def test_a_group_of_failed_rollouts_makes_nothing_wait(traffic: Traffic) -> None:
    await traffic.open("failed", "f0", "f1")
    await traffic.rollouts("failed", {"f0": None, "f1": None}, status="failed")
    await traffic.rollouts("t", {"a": 0.0, "b": 1.0})
    collector = traffic.collector()
    assert advantages(await collector.next_batch(0)) == {"a-0": -0.5, "b-0": 0.5}
    assert await collector.next_batch(0) is None
    assert await collector.waiting.totals() == (0, None), "and no round waits for it"
    assert await traffic.batch(failed_rollouts="zero") is None
    assert set(await traffic.dropped("f0", "f1")) == {EQUAL}


async def test_a_step_that_was_not_finished_gives_back_what_it_dropped_too(traffic: Traffic) -> None:
    await traffic.rollouts("t", {"t0": 0.0, "t1": 1.0})
    await traffic.rollouts("u", {"equal0": 1.0, "equal1": 1.0})
    first = await traffic.batch(tasks_per_step=2)
    assert None not in await traffic.dropped("equal0", "equal1")
    assert await traffic.store.steps.release_unfinished() == [1]
    assert await traffic.dropped("equal0", "equal1") == [None, None]
    assert await traffic.batch(tasks_per_step=2) == first
    await traffic.store.steps.trained(1, None, {})
    assert await traffic.store.steps.release_unfinished() == []
    assert None not in await traffic.dropped("equal0", "equal1")


async def test_a_late_sibling_is_compared_with_its_group_also_where_that_taught_nothing(traffic: Traffic) -> None:
    await traffic.open("t", "equal 0", "equal 1", "later")
    await traffic.rollouts("t", {"equal 0": 1.0, "equal 1": 1.0})
    assert await traffic.batch(group_size=3, **AT_ONCE) is None, "they teach nothing alone"
    await traffic.rollout("later", "t", 0.0)
    found = await traffic.taken(group_size=3)
    assert advantages(found) == pytest.approx({"later-0": -2 / 3}), "only it becomes a row"
    assert (found.compared, found.metrics["groups_incomplete"]) == (1, 0.0)


async def test_a_late_sibling_takes_no_place_of_a_group_and_is_compared_with_its_own(traffic: Traffic) -> None:
    await traffic.open("t", "a", "b", "late")
    await traffic.open("t", "next 0", "next 1", "next 2")
    await traffic.rollouts("t", {"a": 0.0, "b": 1.0})
    assert await traffic.batch(group_size=3, **AT_ONCE) is not None
    await traffic.rollouts("t", {"next 0": 5.0, "next 1": 5.0, "next 2": 8.0, "late": 2.0})
    await traffic.rollouts("u", {"u0": 0.0, "u1": 0.0, "u2": 3.0})
    found = advantages(await traffic.batch(group_size=3, tasks_per_step=2))
    assert found == pytest.approx({
        "next 0-0": -1.0, "next 1-0": -1.0, "next 2-0": 2.0, "late-0": 1.0, "u0-0": -1.0, "u1-0": -1.0, "u2-0": 2.0
    })  # fmt: skip


@pytest.mark.parametrize("baseline", TrainerConfig.known("baseline"))
async def test_with_any_baseline_a_step_compares_all_rollouts_if_so_configured(traffic: Traffic, baseline: str) -> None:
    for task, value in (("t", 0.0), ("u", 1.0)):  # within each task they are equal
        await traffic.rollouts(task, {f"{task}0": value, f"{task}1": value})
    found = advantages(await traffic.batch(baseline=baseline, compare="step", tasks_per_step=2))
    assert found.keys() == {"t0-0", "t1-0", "u0-0", "u1-0"} and found["t0-0"] < 0 < found["u0-0"]


async def test_a_step_compares_no_rollouts_that_only_a_teacher_keeps(traffic: Traffic) -> None:
    for name, task, value in (("a", "t", 0.0), ("b", "t", 1.0), ("lone", None, 7.0)):
        await traffic.rollout(name, task, value)
    teacher = {"base_url": "http://127.0.0.1:1/v1"}
    batch = await traffic.batch(baseline="reinforce_pp", compare="step", tasks_per_step=2, teacher=teacher)
    assert advantages(batch) == pytest.approx({"a-0": -1.0, "b-0": 1.0})


async def test_rollouts_without_a_task_wait_or_are_compared_with_those_before_them(traffic: Traffic) -> None:
    await traffic.rollouts(None, {f"before-{i}": float(i) for i in range(4)} | {"new": 4.0})
    assert await traffic.batch() is None
    assert await traffic.dropped("new") == [None]
    batch = await traffic.taken(lone_rollouts="running", group_size=5)
    # Those that had too few before them to be compared with are not trained on, but count: 0, 1, 2, 3 and 4 itself.
    assert advantages(batch) == {"new-0": 2.0}
    assert batch.metrics["rollouts_lone"] == 5.0
    assert await traffic.dropped("before-0", "before-3") == ["no siblings"] * 2


async def test_a_rollout_alone_in_its_task_is_compared_with_earlier_ones_of_it(traffic: Traffic) -> None:
    await traffic.rollouts("u", {f"u{i}": 100.0 for i in range(8)})
    await traffic.rollouts("t", {f"t{i}": float(i % 2) for i in range(4)})
    await traffic.rollouts("t", {f"taught {i}": 1.0 for i in range(4)}, version=None)  # no baseline
    await traffic.batch(tasks_per_step=2)  # trains on them
    await traffic.rollout("alone", "t", 3.0)
    found = await traffic.batch(lone_rollouts="running", **AT_ONCE)
    assert advantages(found) == {"alone-0": 3.0 - fmean([3.0, 0.0, 1.0, 0.0, 1.0])}
    await traffic.rollout("first", "new task", 104.0)
    found = await traffic.batch(lone_rollouts="running", **AT_ONCE)
    # Nothing of its task: those before it, whatever their task.
    assert advantages(found) == {"first-0": 104.0 - fmean([104.0, 3.0, *[0.0, 1.0] * 2, *[100.0] * 8])}


NO_LOGPROBS = {"choices": (Choice(0, (3,), (), "stop"),), "untrainable_reason": "no log-probabilities"}
TWO_ANSWERS = {"choices": (Choice(0, (3,), (-1.0,), "stop"), Choice(1, (4,), (-1.0,), "stop"))}
UNUSABLE: list[tuple[dict[str, Any], str, str]] = [
    (NO_LOGPROBS, "calls_untrainable", "no trainable calls"),
    (TWO_ANSWERS, "calls_ambiguous", "several answers"),
    ({"prompt_token_ids": tuple(range(60))}, "rows_too_long", "longer than"),
]


async def test_an_unusable_rollout_costs_others_nothing(traffic: Traffic) -> None:
    for task, (end, counted, why) in enumerate(UNUSABLE):
        await traffic.rollouts(f"t{task}", {f"a{task}": 1.0, f"b{task}": 0.0})
        await traffic.rollout(f"bad{task}", f"t{task}", 0.5, **end)
        batch = await traffic.taken(group_size=3, max_sample_tokens=50)
        assert advantages(batch) == {f"a{task}-0": 0.5, f"b{task}-0": -0.5}
        assert [batch.metrics[name] for name in (counted, "rollouts_dropped", "rollouts_trained")] == [1, 1, 2]
        assert why in str(await traffic.dropped(f"bad{task}"))


async def test_rollouts_that_called_no_model_teach_nothing_whatever_their_rewards(traffic: Traffic) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        await traffic.store.rollouts.open([(RolloutName(name, "t"), f"hash of {name}")], {})
        await traffic.post(Reward(name, value))
    assert await traffic.batch() is None
    assert set(await traffic.dropped("a", "b")) == {"no trainable calls"}


# Several agents in a rollout ------------------------------------------------------------------------------------------

PAIR = (("a", 1.0), ("b", 0.0))


async def talk(
    traffic: Traffic, name: str, final: float, *calls: tuple[str | None, tuple[int, ...]], **versions: int
) -> None:
    """A rollout of (agent, prompt) calls, each answered by the tokens 3 4; `versions` by agent, 0 by default."""
    agents, prompts = zip(*calls, strict=True)
    by = [versions.get(str(agent), 0) for agent in agents]
    await traffic.rollout(name, "t", final, [0.0] * len(calls), version=by, agents=agents, prompts=prompts)


async def test_what_other_agents_said_is_context_of_a_trained_agents_row(traffic: Traffic) -> None:
    calls = [("planner", (0, 1)), ("executor", (0, 1, 3, 4, 2)), ("planner", (0, 1, 3, 4, 2, 3, 4, 3))]
    for name, final in PAIR:
        await talk(traffic, name, final, *calls)
    batch = await traffic.taken(agents=["planner"])
    row = batch.samples[0]
    assert len(batch.samples) == 2 and row.call_ids == ("a-0", "a-2")
    assert row.token_ids == (0, 1, 3, 4, 2, 3, 4, 3, 3, 4)
    assert row.mask == (0, 0, 1, 1, 0, 0, 0, 0, 1, 1)
    assert row.advantages == (0, 0, 0.5, 0.5, 0, 0, 0, 0, 0.5, 0.5)
    assert batch.metrics["calls_of_others"] == 2


async def test_how_stale_a_rollout_is_its_trained_agents_calls_say(traffic: Traffic) -> None:
    for name, final in PAIR:  # the executor asks for the base model, by its own name
        await talk(traffic, name, final, ("planner", (0, 1)), ("executor", (0, 2)), planner=49)
    batch = await traffic.taken(50, agents=["planner"])
    assert (batch.metrics["staleness_mean"], batch.metrics["staleness_max"]) == (1, 1)


async def test_rollouts_without_a_trained_agent_are_dropped(traffic: Traffic, caplog: pytest.LogCaptureFixture) -> None:
    for name, final in PAIR:
        await talk(traffic, name, final, ("planner", (0, 1)), (None, (0, 2)))
    with caplog.at_level(logging.WARNING):
        assert await traffic.batch(agents=["planer"]) is None
    assert await traffic.dropped("a") == ["trainer.agents names none of its agents"]
    assert "trainer.agents: there are no calls by planer so far" in caplog.text
    assert "agents seen: no name (calls without X-Agent-Name), planner" in caplog.text


async def test_a_group_in_which_no_agent_has_a_sibling_is_dropped_for_that(traffic: Traffic) -> None:
    await talk(traffic, "a", 1.0, ("planner", (0, 1)))
    await talk(traffic, "b", 0.0, ("writer", (0, 1)))
    assert await traffic.batch(agents=["planner", "writer"]) is None
    assert await traffic.dropped("a") == ["no siblings with calls of the same agent"]


async def test_rows_of_a_rollout_are_parted_by_adapter_and_others_answers_are_context(traffic: Traffic) -> None:
    """Each asks with all that was said before: one row where they share an adapter, two where they do not."""
    calls = [("writer", (0, 1)), ("checker", (0, 1, 3, 4, 2)), ("rewriter", (0, 1, 3, 4, 2, 3, 4, 3))]
    for name, last, final in (("a", 3, 1.0), ("b", 3, 0.0), ("c", 1, 0.0)):
        await talk(traffic, name, final, *calls[:last])
    found = await traffic.taken(adapters={"writer": ["writer", "rewriter"], "checker": ["checker"]}, group_size=3)
    assert {(s.adapter, s.call_ids) for s in found.samples} == {
        ("writer", ("a-0", "a-2")), ("checker", ("a-1",)), ("writer", ("b-0", "b-2")), ("checker", ("b-1",)),
        ("writer", ("c-0",)),
    }  # fmt: skip
    (whole,) = (s for s in found.samples if s.call_ids == ("a-0", "a-2"))
    assert whole.token_ids == (0, 1, 3, 4, 2, 3, 4, 3, 3, 4)
    assert whole.mask == (0, 0, 1, 1, 0, 0, 0, 0, 1, 1)
    assert (found.compared, found.compared_by_adapter) == (3, {"writer": 3, "checker": 2})
