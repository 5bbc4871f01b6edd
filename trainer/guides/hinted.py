"""Writes hints into recorded prompts, so that the same sampled answer is scored after a longer prompt. Pure, no torch.

An answer keeps its exact tokens. Its prompt is shown again by the chat template, with the hint at the end of the last
message of a user. First it is shown without the hint: only a template that gives the recorded tokens is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ...proxy.apis.as_chat.template import Template
from ...proxy.apis.as_chat.translators import chat_request
from ...proxy.types import ModelCall
from ..rows.rendered import CANNOT_BE_SHOWN, as_shown, shown, tokens_of
from ..types import Sample
from .sources import without_quotes

Json = dict[str, Any]
Hint = Literal["comments", "siblings"]

# What the policy reads after the user's own words. docs/guides.md shows it.
WORDING: dict[Hint, str] = {
    "comments": "{message}\n\nAn earlier answer got this feedback:\n{hint}\n\nAnswer again, and do better.",
    "siblings": "{message}\n\nThis earlier answer was a good one:\n{hint}\n\nAnswer again, as well as that.",
}
# Characters of a hint; a longer one is cut.
MOST = 4000
# Servers differ in these, but a prompt that comes out otherwise than recorded is not used.
_TEMPLATE = Template(merges_system=False, disabled_effort="none", ignores_no_tools=True)


def answers_of(sample: Sample) -> Iterator[tuple[str, int, int]]:
    """Return each answer in a row: its call and [start, end). There is context between any two."""
    runs, place = [], 0
    for sampled, tokens in groupby(sample.mask):
        start, place = place, place + len(list(tokens))
        if sampled:
            runs.append((start, place))
    for call_id, (start, end) in zip(sample.call_ids, runs, strict=True):
        yield call_id, start, end


def hinted_prompt(call: ModelCall, hint: str, kind: Hint, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...] | None:
    """Return the tokens of the call's prompt with a hint; None if the recorded prompt cannot be had again."""
    try:
        request = chat_request(call.endpoint, call.request, _TEMPLATE)
        if request is None:
            return None
        messages = [as_shown(message) for message in request["messages"]]
        if _prompt(tokenizer, request, messages) != call.prompt_token_ids:
            return None
        if kind == "comments":
            hint = without_quotes(hint, tokenizer.decode(list(call.response_token_ids), skip_special_tokens=True))
        return _prompt(tokenizer, request, _with_hint(messages, hint, kind))
    except CANNOT_BE_SHOWN:
        return None


def hinted_row(sample: Sample, start: int, end: int, prompt: Sequence[int]) -> Sample:
    """Return a row of another prompt and the answer at [start, end), which was sampled as it is in `sample`."""
    answer, context = sample.token_ids[start:end], len(prompt)
    ways = [(context, context + len(answer), how) for s, e, how in sample.shaped if (s, e) == (start, end)]
    zeros = (0.0,) * (context + len(answer))
    return Sample(
        rollout_id=sample.rollout_id,
        task_id=sample.task_id,
        token_ids=(*prompt, *answer),
        mask=(0,) * context + (1,) * len(answer),
        logprobs=zeros,
        advantages=zeros,
        temperatures=(1.0,) * context + sample.temperatures[start:end],
        adapter=sample.adapter,
        shaped=tuple(ways),
    )


def _prompt(tokenizer: PreTrainedTokenizerBase, request: Json, messages: Sequence[Json]) -> tuple[int, ...]:
    return tuple(tokens_of(tokenizer, shown(tokenizer, request, messages, add_generation_prompt=True)))


def _with_hint(messages: Sequence[Json], hint: str, kind: Hint) -> list[Json]:
    """The messages with a hint in the last one of a user. Raise ValueError if there is none."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    cut = hint if len(hint) <= MOST else f"{hint[:MOST]} […]"
    content = WORDING[kind].format(message=messages[last]["content"], hint=cut)
    return [*messages[:last], messages[last] | {"content": content}, *messages[last + 1 :]]
