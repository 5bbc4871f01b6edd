"""Tasks, evaluators and teachers of the examples; their agents run in frameworks/test_examples.py."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.examples import EXAMPLES, modules

ASKED_IN = {"calculator": "expression", "rag": "question", "reverse_text": "question"}


@pytest.mark.parametrize(("name", "key"), ASKED_IN.items())
def test_no_held_out_task_is_trained_on_and_a_seed_is_a_split(name: str, key: str) -> None:
    tasks = modules(name).tasks
    for seed in range(3):
        train, held_out = tasks.split(seed, 200, 32)
        assert (len(train), len(held_out)) == (200, 32)
        for one in (key, "task_id"):
            assert len({task[one] for task in (*train, *held_out)}) == 232
        if name == "rag":
            assert not {task["bridge"] for task in train} & {task["bridge"] for task in held_out}
        assert tasks.split(seed, 200, 32) == (train, held_out) != tasks.split(seed + 1, 200, 32)


@pytest.mark.parametrize(
    ("name", "task", "rewards"),
    [
        (
            "calculator",
            {"answer": 62},
            {"62": 1, " 62. ": 1, "It is 62": 1, "61": 0, "62 or 63": 0, "-62": 0, "162": 0, "": 0},
        ),
        (
            "rag",
            {"answer": "Amy Webb"},
            {
                "<answer>Amy Webb</answer>": 1, " <answer> the amy webb. </answer>\n": 1,
                "<answer>Amy Kent</answer>": 0.55, "<answer>Ann Moor</answer>": 0.1, "Amy Webb": 0.9,
                "It is <answer>Amy Webb</answer>": 0.9, "<answer>Amy Webb</answer><answer>Amy Webb</answer>": 0.9,
                "Ann Moor is married to Amy Webb.": 0.4, "<answer></answer>": 0, "": 0,
            },
        ),
        (
            "reverse_text",
            {"question": "abc"},
            {
                "<reversed_text>cba</reversed_text>": 1, "Here: <reversed_text>\ncba\n</reversed_text> so": 1,
                "<reversed_text>cab</reversed_text>": 2 / 3, "<reversed_text>abc</reversed_text>": 1 / 3,
                "<reversed_text></reversed_text>": 0, "cba": 0, "<reversed_text>cba": 0,
            },
        ),
    ],
)  # fmt: skip
def test_the_reward_of_an_answer(name: str, task: dict[str, Any], rewards: dict[str, float]) -> None:
    score = modules(name).tasks.score
    assert {answer: score(task, answer)[0] for answer in rewards} == pytest.approx(rewards)


@pytest.mark.parametrize("name", ["calculator", "reverse_text"])
def test_a_teacher_is_right_more_often_than_not(name: str) -> None:
    tasks, teacher, source = modules(name).tasks, modules(name).teacher, random.Random(0)
    train, _ = tasks.split(0, 200, 5)
    said = [
        teacher.reply({"messages": [{"role": "user", "content": task["question"]}]}, task, source) for task in train
    ]
    if name == "calculator":
        calls = [one["tool_calls"][0]["function"]["arguments"] for one in said]
        right = [f'"{task["expression"]}"' in call for task, call in zip(train, calls, strict=True)]
        told = {"messages": [{"role": "tool", "content": "62"}]}
        assert teacher.reply(told, train[0], source) == {"content": "62"}, "it repeats what the tool says"
    else:
        rewards = [tasks.score(task, one["content"])[0] for task, one in zip(train, said, strict=True)]
        right = [reward == 1 for reward in rewards]
        assert max(reward for reward in rewards if reward < 1) < 0.9, "what tune.sft.min_reward leaves out"
    assert 0.5 < sum(right) / len(right) < 0.7


def test_the_corpus_that_ships_is_the_one_that_is_made() -> None:
    tasks, lines = modules("rag").tasks, (EXAMPLES / "rag" / "corpus.jsonl").read_text().splitlines()
    assert tasks.corpus() == [json.loads(line)["text"] for line in lines]
    with pytest.raises(ValueError, match="for training"):
        tasks.split(0, 240, 32)  # more questions than there are


def test_a_file_gives_the_texts_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, file = modules("reverse_text").tasks, tmp_path / "texts.txt"
    file.write_text("one\n\ntwo\none\nthree\n")
    monkeypatch.setenv("REVERSE_TEXTS", str(file))
    train, held_out = tasks.split(0, 200, 1)
    assert sorted(task["question"] for task in (*train, *held_out)) == ["one", "three", "two"]
    with pytest.raises(SystemExit, match="3 different lines; 4 are needed"):
        tasks.split(0, 200, 3)
