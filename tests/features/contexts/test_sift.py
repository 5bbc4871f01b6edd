"""What a step learns from a rollout of several contexts: by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, ModelCall, Reward, RolloutName
from lightning_proxy.features.contexts.config import ContextsConfig
from lightning_proxy.features.contexts.trainer import sifted
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.credit.strategies import Credited, group_credit
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.sections import TrainerConfig
from support.stores import store_url

TASK = [{"role": "system", "content": "You are a coder."}, {"role": "user", "content": "Find why the build fails."}]
LOST, USED, SUMMARY, LAST = (
    {"role": "assistant", "content": text}
    for text in (
        "The compiler is too old for the flags that the build file sets, I think.",
        "Let me read the log of the last build before I say anything about it.",
        "So far: the log of the last build says that a header of the parser is missing.",
        "The header of the parser was moved in the last commit: include it from its new place.",
    )
)
SUMMARISE, SINCE = {"role": "user", "content": "Sum up."}, {"role": "user", "content": str(SUMMARY["content"])}


def asked(place: int, messages: list[Any], answer: Any) -> ModelCall:
    made = call(f"c{place}", request={"messages": messages}, response={"choices": [{"message": answer}]})
    return replace(made, seq=place, started_at=float(place), latency_ms=1.0)


CALLS = [
    asked(0, TASK, LOST),
    asked(1, TASK, USED),
    asked(2, [*TASK, USED, SUMMARISE], SUMMARY),
    asked(3, [*TASK, SINCE], LAST),
]
HALF, DOWN = Credited(1.0, 0.5), Credited(1.0, -0.5)


def credited(calls: list[ModelCall], reward: float, **settings: Any) -> list[Credited | None]:
    """The credit of a rollout's calls; its sibling has as many, none of them rejected, and no reward."""
    config = TrainerConfig.model_validate({"baseline": "dr_grpo", **settings})
    other = [call(f"s{place}", seq=place) for place in range(3)]
    found = [sifted(config.section(ContextsConfig), of) for of in (calls, other)]
    group = [Sibling(one.calls, RolloutRewards(at), one) for one, at in zip(found, (reward, 0.0), strict=True)]
    return group_credit(group, config)[0]


@pytest.mark.parametrize(
    ("settings", "credit"),
    [
        ({}, [None, HALF, HALF, HALF]),
        ({"rejected": "negative"}, [DOWN, HALF, HALF, HALF]),
        ({"rejected": "as_others"}, [HALF, HALF, HALF, HALF]),
        ({"summaries": "leave_out"}, [None, HALF, None, HALF]),
    ],
)
def test_a_rejected_attempt_and_a_summary_get_the_credit_of_the_settings(settings: Any, credit: Any) -> None:
    assert credited(CALLS, 1.0, **settings) == credit
    assert sifted(ContextsConfig(**settings), CALLS).counts == {"calls_rejected": 1, "calls_summaries": 1}


def test_a_rejected_attempt_is_never_pulled_up() -> None:
    assert credited(CALLS, -1.0, rejected="negative") == [Credited(-1.0, -0.5)] * 4


def test_calls_of_agents_that_are_not_trained_stay_left_out() -> None:
    assert credited(CALLS, 1.0, rejected="negative", agents=["another"]) == [None] * 4


GO_ON, PROMPT = {"role": "user", "content": "Go on, then."}, (0, 5, 6)
# The second answer is rejected for the third.
TRIED_TWICE = [
    asked(0, TASK, USED),
    asked(1, [*TASK, USED, GO_ON], LOST),
    asked(2, [*TASK, USED, GO_ON], SUMMARY),
    asked(3, [*TASK, USED, GO_ON, SUMMARY, GO_ON], LAST),
]


@pytest.mark.parametrize(
    ("rejected", "credit"),
    [
        # Three steps: 0.5 · 0.5 · 1, 0.5 · 1 and 1, next to the sibling's zeros.
        ("leave_out", [Credited(0.25, 0.125), None, Credited(0.5, 0.25), Credited(1.0, 0.5)]),
        # Four steps. The last one has no sibling, and keeps the baseline of the third: 1 - 0.25.
        ("as_others", [Credited(0.125, 0.0625), Credited(0.25, 0.125), Credited(0.5, 0.25), Credited(1.0, 0.75)]),
    ],
)
def test_an_attempt_that_is_left_out_is_no_step_of_a_discount(rejected: str, credit: Any) -> None:
    assert credited(TRIED_TWICE, 1.0, credit="discounted", discount=0.5, rejected=rejected) == credit


async def recorded(store: Store, rollout: str, reward: float, answer: int) -> None:
    """A rejected answer (of the token `answer` - 9), one of `answer` in its place, and one of 11 after it."""
    asked = {"messages": TASK}
    turns = [(asked, LOST, PROMPT, answer - 9), (asked, USED, PROMPT, answer),
             ({"messages": [*TASK, USED, GO_ON]}, LAST, (*PROMPT, answer, 1, 8), 11)]  # fmt: skip
    async with Recorder(store, merged=False) as recorder:
        for place, (request, said, prompt, token) in enumerate(turns):
            call_id, at = f"{rollout}-{place}", 10.0 * place
            name = RolloutName(rollout, "t")
            await recorder.start(CallStart(call_id, name, "chat/completions", "policy", 0, request, at))
            choice, response = Choice(0, (token, 1), (-1.0, -1.0), "stop"), {"choices": [{"message": said}]}
            await recorder.end(CallEnd(call_id, rollout, "ok", response, 200, prompt, (choice,), latency_ms=1.0))
    await store.rewards.post([Reward(rollout, reward)], None, b"")


@pytest.mark.parametrize(("rejected", "is_taught"), [("negative", False), ("as_others", True)])
async def test_a_rejected_attempt_is_no_lesson_either(tmp_path: Path, rejected: str, is_taught: bool) -> None:
    lessons = pytest.importorskip("lightning_proxy.features.tune.lessons")
    settings = TrainerConfig.model_validate({"rejected": rejected})
    trainer: Any = SimpleNamespace(settings=settings, tokenizer=None, max_tokens=100, vocabulary=None)
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        await recorded(store, "good", 1.0, 30)
        await recorded(store, "bad", 0.0, 32)
        sift = partial(sifted, settings.section(ContextsConfig))
        found = await lessons.LessonReader("kto", store, trainer, sift).read()
    taught = {token for one in found.train for row in one.rows for token in compress(row.token_ids, row.mask)}
    assert (21 in taught) == is_taught and 30 in taught
    assert found.metrics["calls_rejected"] == 2
