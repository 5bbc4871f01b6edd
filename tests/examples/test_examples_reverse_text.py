"""The example that writes texts backwards: its texts, evaluator and teacher; the agent runs in frameworks/."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest

from support.examples import modules

TEXT = {"question": "abc"}


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    return modules("reverse_text").tasks


def test_no_held_out_text_is_trained_on_and_a_seed_is_a_split(tasks: ModuleType) -> None:
    train, held_out = tasks.split(1, 200, 32)
    assert len({task["question"] for task in (*train, *held_out)}) == 232 == len({t["task_id"] for t in train}) + 32
    assert tasks.split(1, 200, 32) == (train, held_out)
    assert tasks.split(2, 200, 32) != (train, held_out)


def test_a_file_gives_the_texts_instead(tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("one\n\ntwo\none\nthree\n")
    monkeypatch.setenv("REVERSE_TEXTS", str(file))
    train, held_out = tasks.split(0, 200, 1)
    assert sorted(task["question"] for task in (*train, *held_out)) == ["one", "three", "two"]
    with pytest.raises(SystemExit, match="3 different lines; 4 are needed"):
        tasks.split(0, 200, 3)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<reversed_text>cba</reversed_text>", 1),
        ("Here: <reversed_text>\ncba\n</reversed_text> so", 1),
        ("<reversed_text>cab</reversed_text>", 2 / 3),
        ("<reversed_text>abc</reversed_text>", 1 / 3),
        ("<reversed_text></reversed_text>", 0),
        ("cba", 0),
        ("<reversed_text>cba", 0),
    ],
)
def test_the_reward_is_the_share_of_letters_that_match_in_order(tasks: ModuleType, answer: str, reward: float) -> None:
    assert tasks.score(TEXT, answer)[0] == pytest.approx(reward)


def test_the_teacher_is_right_more_often_than_not(tasks: ModuleType) -> None:
    teacher, source = modules("reverse_text").teacher, random.Random(0)
    train, _ = tasks.split(0, 200, 5)
    rewards = [tasks.score(task, teacher.reply({}, task, source)["content"])[0] for task in train]
    assert 0.5 < sum(reward == 1 for reward in rewards) / len(rewards) < 0.7
    assert max(reward for reward in rewards if reward < 1) < 0.9, "what tune.sft.min_reward leaves out"
