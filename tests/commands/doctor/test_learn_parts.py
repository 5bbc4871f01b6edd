"""The test of `doctor --learn` of whether what was rewarded became likelier."""

from __future__ import annotations

import random

from lightning_proxy.commands.doctor.learn.agent import prompt_of
from lightning_proxy.commands.doctor.learn.steps import likelier


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
