"""The calculator example's tasks, evaluator and teacher; the agent itself runs in frameworks/test_examples.py."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from support.examples import modules


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    return modules("calculator").tasks


@pytest.mark.parametrize("seed", range(3))
def test_no_held_out_problem_is_trained_on(tasks: ModuleType, seed: int) -> None:
    train, held_out = tasks.split(seed, 200, 32)
    assert (len(train), len(held_out)) == (200, 32)
    assert {task["expression"] for task in train}.isdisjoint(task["expression"] for task in held_out)
    assert len({task["task_id"] for task in (*train, *held_out)}) == 232
    assert all(str(task["answer"]) == str(eval(task["expression"])) for task in train)


def test_a_seed_is_a_split(tasks: ModuleType) -> None:
    assert tasks.split(1, 20, 5) == tasks.split(1, 20, 5)
    assert tasks.split(1, 20, 5) != tasks.split(2, 20, 5)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("62", 1), (" 62. ", 1), ("It is 62", 1), ("61", 0), ("62 or 63", 0), ("-62", 0), ("162", 0), ("", 0)],
)
def test_only_the_number_alone_is_right(tasks: ModuleType, answer: str, reward: float) -> None:
    assert tasks.score({"answer": 62}, answer)[0] == reward


def test_the_teacher_is_right_more_often_than_not_and_repeats_what_the_tool_says(tasks: ModuleType) -> None:
    teacher, source = modules("calculator").teacher, random.Random(0)
    train, _ = tasks.split(0, 200, 5)
    calls = [
        (task, teacher.reply({"messages": [{"role": "user", "content": task["question"]}]}, task, source))
        for task in train
    ]
    right = sum(f'"{task["expression"]}"' in said["tool_calls"][0]["function"]["arguments"] for task, said in calls)
    assert 0.5 < right / len(calls) < 0.7
    assert teacher.reply({"messages": [{"role": "tool", "content": "62"}]}, train[0], source) == {"content": "62"}
