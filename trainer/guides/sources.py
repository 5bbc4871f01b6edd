"""Finds the hint for each call of a step: comments on it, or the answer of a better sibling. Pure, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ...proxy.returns import Rules, earned
from ...proxy.types import ModelCall, Reward
from ..credit.rewards import JUDGE

QUOTED = 16  # characters in a row that a comment has from the answer: no chance
LEFT_OUT = "…"
BEGUN, THOUGHT = "<think>", "</think>"  # the text between them is no answer


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rollout of the step: its task, its calls in order, and all its rewards, oldest first."""

    task_id: str
    calls: Sequence[ModelCall]
    rewards: Sequence[Reward]


def comments(rollouts: Sequence[Recorded]) -> dict[str, str]:
    """Return hints by call id: the comments on the call's rewards, or else on those of its rollout.

    The newest reward of each name counts: without a comment it takes back earlier ones; one of a call takes back those
    of its rollout, too. A judge's comments are no hints.
    """
    found: dict[str, str] = {}
    for rollout in rollouts:
        newest = {(reward.call_id, reward.name): (n, comment(reward)) for n, reward in enumerate(rollout.rewards)}
        of: dict[str | None, dict[str, tuple[int, str]]] = {}
        for (call_id, name), numbered in newest.items():
            of.setdefault(call_id, {})[name] = numbered
        for call in rollout.calls:
            own, shared = of.get(call.call_id, {}), of.get(None, {})
            last = {name: numbered for name, numbered in shared.items() if name not in own or own[name] < numbered}
            texts = [text for _, text in own.values() if text] or [text for _, text in last.values() if text]
            if texts:
                found[call.call_id] = "\n".join(texts)
    return found


def comment(reward: Reward) -> str:
    """Return the comment on a reward; "" if it has none."""
    return "" if reward.name == JUDGE else (reward.comment or "").strip()


def without_quotes(comment: str, answer: str) -> str:
    """Return a comment without its quotations of the answer: 16 characters in a row, or all of it in quotation marks.

    A policy that reads its own answer in the hint finds every token of it likelier, right or wrong.
    """
    answer = answer.strip()
    runs = {answer[i : i + QUOTED] for i in range(len(answer) - QUOTED + 1)}
    kept, place = "", 0
    while place < len(comment):
        end = place
        while comment[end : end + QUOTED] in runs:
            end += 1
        if end == place:
            kept, place = kept + comment[place], place + 1
        else:
            kept, place = kept + LEFT_OUT, end + QUOTED - 1
    if answer:
        kept = re.sub(rf"""(["'`“«„‘]+){re.escape(answer)}(["'`”»“’]+)""", rf"\1{LEFT_OUT}\2", kept)
    return kept


def siblings(rollouts: Sequence[Recorded], rules: Rules, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return hints by call id: all answers that the same agent gave in the best rollout of the task.

    The best has the highest return, by `rules`. Rollouts with as high a one get no hint.
    """
    tasks: dict[str, list[tuple[float, Recorded]]] = {}
    for rollout in rollouts:
        posted = earned(rollout.rewards, rules).returned
        tasks.setdefault(rollout.task_id, []).append((-math.inf if posted is None else posted, rollout))
    found: dict[str, str] = {}
    for of_task in tasks.values():
        highest, best = max(of_task, key=lambda one: one[0])
        answers = _answers(best, tokenizer)
        worse = [call for reward, rollout in of_task if reward < highest for call in rollout.calls]
        found |= {call.call_id: answers[call.agent] for call in worse if call.agent in answers}
    return found


def _answers(rollout: Recorded, tokenizer: PreTrainedTokenizerBase) -> dict[str | None, str]:
    """Each agent's answers, in order, as the policy wrote them: with tool calls, without thoughts."""
    found: dict[str | None, list[str]] = {}
    for call in rollout.calls:
        if call.trainable and call.is_decision:
            text: str = tokenizer.decode(list(call.response_token_ids), skip_special_tokens=True)
            _, ended, answer = text.rpartition(THOUGHT)
            if ended or BEGUN not in text:
                found.setdefault(call.agent, []).append(answer.strip())
    return {agent: "\n\n".join(filter(None, texts)) for agent, texts in found.items() if any(texts)}
