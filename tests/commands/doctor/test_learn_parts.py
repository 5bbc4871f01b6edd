"""What `doctor --learn` rewards, and its test of whether that became likelier."""

from __future__ import annotations

import random

import pytest

from lightning_proxy.commands.doctor.learn.agent import prompt_of
from lightning_proxy.commands.doctor.learn.steps import RolloutText, aim_of, likelier


def of_texts(*groups: list[str]) -> list[list[RolloutText]]:
    return [[RolloutText(text, len(text)) for text in group] for group in groups]


@pytest.mark.parametrize(
    ("groups", "aim"),
    [
        ([["a dog", "my cat"], ["a dog", "my dog"]], 'the word "my"'),
        # A word that tells tasks apart, but no siblings, teaches nothing.
        ([["red", "red"], ["blue", "blue"]], "a shorter answer"),
        ([["xy", "xz"], ["xz", "xyz"]], 'the word "xz"'),
        ([["啊好", "好"], ["好", "啊好"]], 'the word "啊好"'),
        ([["x1", "x2"], ["x3", "x4"], ["x5", "x6"], ["y7", "x8"]], "a shorter answer"),
        ([["xq"], ["xr", "yr"], ["ys", "yt", "yu"]], 'the letter "x"'),
        ([["same", "same"]], "a shorter answer"),
    ],
)
def test_what_tells_siblings_apart_is_rewarded(groups: list[list[str]], aim: str) -> None:
    assert str(aim_of(of_texts(*groups))).endswith(aim)


def test_a_shorter_answer_gets_more() -> None:
    aim = aim_of([[RolloutText("a", 10), RolloutText("a", 4)]])
    assert [aim.reward(RolloutText("a", tokens)) for tokens in (10, 4, 20)] == [0.0, 0.6, 0.0]


def test_only_what_follows_the_rewards_is_likelier() -> None:
    chance = random.Random(0)
    rewards = [[float(chance.random() < 0.5) for _ in range(8)] for _ in range(4)]
    noise = [[chance.gauss(0, 1) for _ in range(8)] for _ in range(4)]
    learnt = [[n + 3 * r for n, r in zip(ns, rs, strict=True)] for ns, rs in zip(noise, rewards, strict=True)]
    assert likelier(list(zip(rewards, learnt, strict=True))).is_sure
    assert not likelier(list(zip(rewards, noise, strict=True))).is_sure
    opposite = [[-change for change in changes] for changes in learnt]
    assert likelier(list(zip(rewards, opposite, strict=True))).p > 0.9
    assert likelier([([1.0, 1.0], [0.5, 0.1])]) == (0.0, 1.0)


def test_a_task_of_the_users_own_has_a_prompt() -> None:
    assert prompt_of('{"task_id": "1", "question": "Why?", "answer": "so"}') == "Why?"
    assert prompt_of('{"n": 3}') == '{"n": 3}'
