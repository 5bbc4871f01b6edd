"""`rewards check`, and `rescore --rewarder`: a scripted judge over HTTP, a real proxy and store."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.judge.config import JudgeConfig
from lightning_proxy.features.judge.rescore import Agreement, Labelled, agreement
from support.judging import ScriptedJudge, completed, judging, ordered

Running = Callable[..., AbstractAsyncContextManager[Any]]

by_number = ordered(lambda text: float(re.findall(r"worth (\d+)", text)[-1]))


@pytest.fixture
async def judge() -> AsyncIterator[ScriptedJudge]:
    async with judging(by_number) as judge:
        yield judge


@pytest.fixture
async def system(running: Running, tmp_path: Path, judge: ScriptedJudge) -> AsyncIterator[Any]:
    """A proxy without rewarders; the commands' configuration has one."""
    async with running(tmp_path) as system:
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        yield system


def rank(judge: ScriptedJudge) -> dict[str, Any]:
    return {"use": [{"kind": "rank", "model": "openai/m", "api_base": f"{judge.url}/v1"}]}


async def rewards(system: Any, rollout_id: str) -> list[tuple[str, float]]:
    found = (await system.call("GET", f"/rollouts/{rollout_id}"))[1]["rewards"]
    return [(one["name"], one["reward"]) for one in found]


async def labelled(system: Any, *labels: float, task: str = "t", name: str = "human") -> list[str]:
    """Completed rollouts that say what they are worth, with people's labels."""
    ids = [f"{task}{i}" for i in range(len(labels))]
    for i, (rollout_id, label) in enumerate(zip(ids, labels, strict=True)):
        await completed(system, rollout_id, f"worth {i}", X_Task_Id=task)
        await system.call("POST", "/reward", {"rollout_id": rollout_id, "reward": label, "name": name})
    return ids


async def test_a_dry_run_shows_scores_and_reasons_and_posts_nothing(system: Any) -> None:
    await completed(system, "a", "worth 1")
    await completed(system, "b", "worth 2")
    done = await system.lightning("rescore", "--rewarder", "rank", "--dry-run", "a", "b")
    assert done.returncode == 0, done.stderr
    *shown, summary = re.sub("  [AB]: ", "  ", done.stdout).splitlines()
    assert shown == [
        "a: reward 0", "  the more, the better", "b: reward 1", "  the more, the better",
        "reward: mean 0.5",
    ]  # fmt: skip
    assert summary.endswith("; nothing was posted")
    assert await rewards(system, "a") == []
    done = await system.lightning("rescore", "--rewarder", "rubric", "--dry-run", "a")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "judge.use has no rubric; there is rank (reward)" in done.stderr


async def test_rescore_asks_a_rewarder_about_the_rollouts_of_each_task(system: Any, judge: ScriptedJudge) -> None:
    for task in ("t", "u"):
        await labelled(system, 0, 1, 2, task=task)
    told = json.loads((await system.lightning("rescore", "--rewarder", "rank", "--json")).stdout)
    assert (told["asked"], len(judge.asked)) == (6, 2)
    given = [(await rewards(system, f"u{i}"))[-1] for i in range(3)]
    assert given == [("reward", 0.0), ("reward", 0.5), ("reward", 1.0)]
    told = json.loads((await system.lightning("rescore", "--rewarder", "rank", "--json")).stdout)
    assert (told["asked"], told["scored_before"]) == (0, 6)


async def test_check_compares_with_labels(running: Running, tmp_path: Path, judge: ScriptedJudge) -> None:
    async with running(tmp_path, rewards=rank(judge)) as system:
        for task in range(6):
            await labelled(system, 0, 1, 2, 3, task=f"t{task}-")
        done = await system.lightning("rewards", "check", "rank", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["labels"], found["pairs"], found["alike"], found["low"]) == (24, 36, 1.0, 1.0)
        assert found["verdict"] == "it agrees more than chance does"
        shown = (await system.lightning("rewards", "check", "rank")).stdout
        assert "pairs ordered alike: 1.00 (1.00 to 1.00) of 36" in shown and "/#/rollouts/t" in shown


async def test_labels_that_make_no_pair_and_rollouts_without_a_score_are_one_line(
    system: Any, judge: ScriptedJudge
) -> None:
    def cannot_order_three(system: str, text: str, shape: Any) -> Any:
        return "I would rather not say." if "Attempt C" in text else by_number(system, text, shape)

    judge.think = cannot_order_three
    for i in range(3):
        await labelled(system, i, task=f"alone{i}")
    done = await system.lightning("rewards", "check", "rank")
    assert (done.returncode, done.stderr.count("\n"), judge.asked) == (2, 1, [])
    assert "no two rollouts of one task have different rewards named human" in done.stderr
    assert "`lightning-proxy reward ID 1 --name human`" in done.stderr
    await labelled(system, 0, 1, 2, task="three")
    done = await system.lightning("rewards", "check", "rank")
    assert "too few labelled rollouts have a score: 3 of 3 have none: openai/m: its answer cannot" in done.stderr
    await labelled(system, 0, 1, task="two")
    shown = (await system.lightning("rewards", "check", "rank")).stdout
    assert "2 labels named human\n3 more have no score: openai/m: its answer cannot be read" in shown


async def test_a_rewarders_own_scores_are_no_labels(running: Running, tmp_path: Path, judge: ScriptedJudge) -> None:
    """They have the name `reward`, too."""
    async with running(tmp_path, rewards=rank(judge)) as system:
        ids = await labelled(system, 0, 1, name="other")
        for source, labels in (("rank:openai/m@of-before", (0, 1)), ("env", (1, 0))):
            for rollout_id, label in zip(ids, labels, strict=True):
                body = {"rollout_id": rollout_id, "reward": label, "source": source}
                await system.call("POST", "/reward", body)
        done = await system.lightning("rewards", "check", "rank", "--label", "reward", "--json")
        found = json.loads(done.stdout)
        assert (found["labels"], found["alike"]) == (2, 0.0)


async def test_a_judge_that_is_away_for_a_moment_is_asked_again(system: Any, judge: ScriptedJudge) -> None:
    await labelled(system, 0, 1)
    judge.status = 429
    waiting = asyncio.ensure_future(system.lightning("rewards", "check", "rank"))
    while not judge.asked:
        await asyncio.sleep(0.05)
    judge.status = 200
    assert (await waiting).returncode == 0


def measured(labels: list[float], scores: list[float]) -> Agreement:
    rows = zip(labels, scores, strict=True)
    found = agreement([Labelled(f"r{i}", "t", *row) for i, row in enumerate(rows)], within_tasks=False)
    assert found is not None
    return found


def test_agreement_by_hand() -> None:
    found = measured([0, 0, 1, 1], [0.1, 0.5, 0.5, 0.9])
    assert (found.pairs, found.alike) == (4, 3.5 / 4)
    found = measured([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert found.verdict == "it agrees more than chance does, by 6 labels; 20 are enough to begin"
    equal = [Labelled("a", "t", 1, 0), Labelled("b", "t", 1, 1)]
    assert agreement(equal, within_tasks=True) is None


def test_the_interval_is_that_of_the_share_of_pairs() -> None:
    """One task of ten labels that are ordered backwards, and seven of two that are ordered rightly."""
    rows = [Labelled(f"r{i}", "long", i, -i) for i in range(10)]
    for task in range(7):
        rows += [Labelled(f"{task}-{i}", f"short {task}", i, i) for i in (0, 1)]
    found = agreement(rows, within_tasks=True)
    assert found is not None and (found.pairs, found.alike) == (52, pytest.approx(7 / 52))
    assert found.low < found.alike < found.high and found.verdict.startswith("it should not be trained on")
