"""A judge for credit.py that is not a model: a script that knows the problems and is right about three steps in four.

It is asked what the trainer's judge is asked, only without HTTP, since there are some 350,000 questions. As a model at
temperature 0, it says the same of the same rollout again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence, Set
from dataclasses import replace

from lightning_proxy.core.config.trainer import TrainerConfig
from lightning_proxy.core.records import ModelCall, Reward
from lightning_proxy.features.judge.rewarders import question, transcript
from lightning_proxy.proxy.api.views import call_view
from lightning_proxy.trainer.credit.strategies import JUDGE, training_rules
from lightning_proxy.trainer.types import RolloutRewards, Sibling

GOOD, NEITHER, BAD = 1.0, 0.5, 0.0
WRONG = 64  # of 256
CONTENT = re.compile(r"^<<\w+ (?:user|assistant): (\d+)$", re.MULTILINE)


def answer(asked: str, idle: Set[int]) -> float:
    """Action 1 is right in every state; in those that are `idle`, no action matters."""
    shown, _, number = asked.rpartition("\n\nThe number for step ")
    state, action = map(int, CONTENT.findall(shown.split("\n\n")[int(number.rstrip(":")) - 1]))
    if state in idle:
        return NEITHER
    is_wrong = hashlib.sha256(asked.encode()).digest()[0] < WRONG
    return GOOD if (action == 1) != is_wrong else BAD


def scores(calls: Sequence[ModelCall], idle: Set[int]) -> list[float]:
    """What the judge says of each call, from 0 to 1."""
    _, shown = transcript([call_view(call) for call in calls])
    return [answer(question(shown, step), idle) for step in range(len(calls))]


def judged(sibling: Sibling, config: TrainerConfig, idle: Set[int]) -> Sibling:
    """With the judge's scores among its rewards."""
    posted = [Reward("r", value, call_id) for call_id, value in sibling.rewards.calls.items()]
    if sibling.rewards.final is not None:
        posted.append(Reward("r", sibling.rewards.final))
    said = zip(sibling.calls, scores(sibling.calls, idle), strict=True)
    posted += [Reward("r", score, call.call_id, name=JUDGE) for call, score in said]
    return replace(sibling, rewards=RolloutRewards.counted(posted, training_rules(config)))
