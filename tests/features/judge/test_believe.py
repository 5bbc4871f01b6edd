"""`rewards try` and `rewards check`, and `rescore --rewarder`: a scripted judge over HTTP, a real proxy and store."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.judge.believe import Agreement, Labelled, agreement, same_order
from lightning_proxy.features.judge.config import JudgeConfig
from support.judging import ScriptedJudge, judging, ordered
from support.rewarded_by import completed

Running = Callable[..., AbstractAsyncContextManager[Any]]

by_number = ordered(lambda text: float(re.findall(r"worth (\d+)", text)[-1]))


def rank(judge: ScriptedJudge) -> dict[str, Any]:
    return {"use": [{"kind": "rank", "model": "openai/m", "api_base": f"{judge.url}/v1"}]}


async def rewards(system: Any, rollout_id: str) -> list[tuple[str, float]]:
    found = (await system.call("GET", f"/rollouts/{rollout_id}"))[1]["rewards"]
    return [(one["name"], one["reward"]) for one in found]


async def labelled(system: Any, *labels: float, task: str = "t") -> list[str]:
    """Completed rollouts that say what they are worth, with people's labels."""
    ids = [f"{task}{i}" for i in range(len(labels))]
    for i, (rollout_id, label) in enumerate(zip(ids, labels, strict=True)):
        await completed(system, rollout_id, f"worth {i}", X_Task_Id=task)
        await system.call("POST", "/reward", {"rollout_id": rollout_id, "reward": label, "name": "human"})
    return ids


async def test_try_shows_scores_and_reasons_and_posts_nothing(running: Running, tmp_path: Path) -> None:
    async with judging(by_number) as judge, running(tmp_path) as system:
        await completed(system, "a", "worth 1")
        await completed(system, "b", "worth 2")
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        done = await system.lightning("rewards", "try", "rank", "a", "b")
        assert done.returncode == 0, done.stderr
        assert re.sub("  [AB]: ", "  ", done.stdout).splitlines() == [
            "a:", "  0  the more, the better", "b:", "  1  the more, the better",
            "nothing was posted; 110 tokens were used",
        ]  # fmt: skip
        assert re.fullmatch(r"2 rollouts: about \d+ tokens\n", done.stderr)
        assert await rewards(system, "a") == []
        done = await system.lightning("rewards", "try", "rubric", "a")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "judge.use has no rubric; there is rank (reward)" in done.stderr


async def test_rescore_asks_a_rewarder_about_the_rollouts_of_each_task(running: Running, tmp_path: Path) -> None:
    async with judging(by_number) as judge, running(tmp_path) as system:
        for task in ("t", "u"):
            await labelled(system, 0, 1, 2, task=task)
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        done = await system.lightning("rescore", "--rewarder", "rank", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["asked"] == 6 and len(judge.asked) == 2
        assert [(await rewards(system, f"u{i}"))[-1] for i in range(3)] == [
            ("reward", 0.0), ("reward", 0.5), ("reward", 1.0),
        ]  # fmt: skip
        done = await system.lightning("rescore", "--rewarder", "rank", "--json")
        assert (json.loads(done.stdout)["asked"], json.loads(done.stdout)["scored_before"]) == (0, 6)


async def test_check_compares_with_labels_and_status_warns_until_then(running: Running, tmp_path: Path) -> None:
    async with judging(by_number) as judge, running(tmp_path, rewards=rank(judge)) as system:
        for task in range(6):
            await labelled(system, 0, 1, 2, 3, task=f"t{task}-")
        (warned,) = (await system.call("GET", "/policy"))[1]["warnings"]
        assert "rank trains, and nobody checked it: label 20 rollouts" in warned
        assert "nobody checked it" in " ".join((await system.lightning("status")).stdout.split())
        done = await system.lightning("rewards", "check", "rank", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["labels"], found["pairs"], found["alike"], found["low"]) == (24, 36, 1.0, 1.0)
        assert found["confusion"] == {"right high": 12, "right low": 12, "wrong high": 0, "wrong low": 0}
        assert found["again"]["alike"] == 1.0 and abs(found["again"]["first_half"]) < 0.5
        assert found["verdict"] == "it agrees more than chance does"
        assert (await system.call("GET", "/policy"))[1]["warnings"] == []
        shown = (await system.lightning("rewards", "check", "rank")).stdout
        assert "pairs ordered alike: 1.00 (1.00 to 1.00) of 36" in shown and "/#/rollouts/t" in shown


async def test_a_judge_that_goes_by_the_place_is_found_out(running: Running, tmp_path: Path) -> None:
    def first_is_best(system: str, text: str, shape: Any) -> Any:
        letters = re.findall(r"Attempt ([A-Z])>>", text)
        return {"reason": "-", "order": [[one] for one in letters]}

    async with judging(first_is_best) as judge, running(tmp_path) as system:
        for task in range(6):
            await labelled(system, 0, 1, 2, 3, task=f"t{task}-")
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        found = json.loads((await system.lightning("rewards", "check", "rank", "--json")).stdout)
        assert found["again"]["first_half"] == pytest.approx(2 / 3) and found["again"]["alike"] < 0.9
        assert found["verdict"].startswith("it should not be trained on")
        (warned,) = await unchecked(system)
        assert "its order may be chance" in warned


async def test_rollouts_without_a_score_are_said_with_the_reason(running: Running, tmp_path: Path) -> None:
    def cannot_order_three(system: str, text: str, shape: Any) -> Any:
        return "I would rather not say." if "Attempt C" in text else by_number(system, text, shape)

    async with judging(cannot_order_three) as judge, running(tmp_path) as system:
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        await labelled(system, 0, 1, 2, task="three")
        done = await system.lightning("rewards", "check", "rank")
        assert done.returncode == 2
        assert "too few labelled rollouts have a score: 3 of 3 have none: openai/m: its answer cannot" in done.stderr
        await labelled(system, 0, 1, task="two")
        shown = (await system.lightning("rewards", "check", "rank")).stdout
        assert "2 labels named human\n3 more have no score: openai/m: its answer cannot be read" in shown


async def unchecked(system: Any) -> list[str]:
    from lightning_proxy.features.judge.proxy import RewardersPlugin

    async with system.store() as store:
        fields = await RewardersPlugin(system.config).policy_fields(store, None)
        return list(fields["warnings"])


async def test_without_labels_one_line_says_how_to_make_some(running: Running, tmp_path: Path) -> None:
    async with judging(by_number) as judge, running(tmp_path) as system:
        await completed(system, "a", "worth 1")
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        done = await system.lightning("rewards", "check", "rank")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "`lightning-proxy reward ID 1 --name human`" in done.stderr


async def test_a_rewarders_own_scores_are_no_labels(running: Running, tmp_path: Path) -> None:
    """They have the name `reward`, too. A check with other labels than people's ends no warning."""
    async with judging(by_number) as judge, running(tmp_path, rewards=rank(judge)) as system:
        for task in range(10):
            await labelled(system, 1, 0, task=f"t{task}-")
            for i in (0, 1):
                own = {"rollout_id": f"t{task}-{i}", "reward": i, "source": "rank:openai/m@of-before"}
                await system.call("POST", "/reward", own)
        done = await system.lightning("rewards", "check", "rank", "--label", "reward")
        assert done.returncode == 2 and "no two rollouts of one task have different rewards named reward" in done.stderr
        for task in range(10):
            for i in (0, 1):
                truth = {"rollout_id": f"t{task}-{i}", "reward": 1 - i, "name": "reward", "source": "env"}
                await system.call("POST", "/reward", truth)
        found = json.loads((await system.lightning("rewards", "check", "rank", "--label", "reward", "--json")).stdout)
        assert (found["labels"], found["alike"]) == (20, 0.0)
        assert "nobody checked it" in (await unchecked(system))[0]


async def test_labels_of_different_tasks_are_no_pairs_for_a_judge_of_siblings(running: Running, tmp_path: Path) -> None:
    async with judging(by_number) as judge, running(tmp_path) as system:
        for i in range(3):
            await labelled(system, i, task=f"t{i}")
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        done = await system.lightning("rewards", "check", "rank")
        assert "no two rollouts of one task have different rewards named human" in done.stderr and judge.asked == []


async def test_a_judge_that_is_away_for_a_moment_is_asked_again(running: Running, tmp_path: Path) -> None:
    async with judging(by_number) as judge, running(tmp_path) as system:
        for task in range(2):
            await labelled(system, 0, 1, task=f"t{task}-")
        system.config = system.config.model_copy(update={"judge": JudgeConfig(**rank(judge))})
        judge.status = 429
        waiting = asyncio.ensure_future(system.lightning("rewards", "check", "rank"))
        while len(judge.asked) < 2:
            await asyncio.sleep(0.05)
        judge.status = 200
        done = await waiting
        assert done.returncode == 0, done.stderr


def measured(labels: list[float], scores: list[float], lengths: list[int], tasks: int = 1) -> Agreement:
    found = [
        Labelled(f"r{i}", f"t{i % tasks}", label, score, length)
        for i, (label, score, length) in enumerate(zip(labels, scores, lengths, strict=True))
    ]
    made = agreement(found, within_tasks=False)
    assert made is not None
    return made


def test_agreement_by_hand() -> None:
    found = measured([0, 0, 1, 1], [0.1, 0.5, 0.5, 0.9], [1, 2, 3, 4])
    assert (found.pairs, found.alike) == (4, 3.5 / 4)
    assert found.confusion == {"right high": 1, "right low": 2, "wrong high": 0, "wrong low": 1}


def test_a_score_that_goes_by_length_is_seen() -> None:
    labels = [i % 2 for i in range(40)]
    lengths = [100 + 7 * i for i in range(40)]
    found = measured(labels, lengths, lengths)
    score, label = found.length
    assert score == pytest.approx(1.0) and label is not None and abs(label) < 0.2
    assert found.verdict.startswith("it should not be trained on")


def test_the_interval_is_that_of_the_share_of_pairs() -> None:
    """One task of ten labels that are ordered backwards, and seven of two that are ordered rightly."""
    labels, scores, tasks = [*range(10)], [*range(10, 0, -1)], ["long"] * 10
    for task in range(7):
        labels, scores, tasks = [*labels, 0, 1], [*scores, 0, 1], [*tasks, *[f"short {task}"] * 2]
    rows = zip(labels, scores, tasks, strict=True)
    found = agreement([Labelled(f"r{i}", task, a, b, 1) for i, (a, b, task) in enumerate(rows)], within_tasks=True)
    assert found is not None and (found.pairs, found.alike) == (52, pytest.approx(7 / 52))
    assert found.low < found.alike < found.high and found.verdict.startswith("it should not be trained on")


def test_few_labels_are_told_and_equal_ones_are_none() -> None:
    found = measured([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [1] * 6)
    assert found.verdict == "it agrees more than chance does, by 6 labels; 20 are enough to begin"
    assert agreement([Labelled("a", "t", 1, 0, 1), Labelled("b", "t", 1, 1, 1)], within_tasks=True) is None


def test_the_same_order_is_a_share_of_pairs() -> None:
    assert same_order([0, 1, 2], [0, 2, 1]) == pytest.approx(2 / 3)
    assert same_order([1], [1]) is None
