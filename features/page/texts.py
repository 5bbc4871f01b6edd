"""`GET /rollouts/{id}/tokens`: what was sampled as text, each token with its log-probability and its advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ...core.errors import NotFound
from ...core.records import ModelCall
from ...proxy.api.answers import ERRORS, answers
from ...proxy.api.bodies import Id, PathId
from ...proxy.api.door import AgentRoute
from ...proxy.api.parts import Parts
from ...proxy.api.requests import large_response, parts_for
from ...proxy.api.training_rows import rows_of
from ...store.reports import CallWithCredit
from .tokenizer import policy_texts

router = APIRouter(prefix="/rollouts", tags=["rollouts"], responses=ERRORS, route_class=AgentRoute)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens in a row: an answer of `call_id`, or what is between answers.

    `texts`: None at a token that ends a character which the one before begins. `advantage`: what the newest step
    trained them with, None if it did not.
    """

    call_id: str | None
    seq: int | None
    step: int | None
    advantage: float | None
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str | None] | None = None


class TokenRuns(BaseModel):
    """`texts` is null where the policy's tokenizer is not at hand, and at a token that ends another's character."""

    data: list[TokenRun]


@router.get("/{rollout_id}/tokens", response_model=None, responses=answers(TokenRuns))
async def get_tokens(
    request: Request, rollout_id: PathId, call_id: Id | None = None, row: int | None = None
) -> Response:
    """The tokens of a rollout's answers, or of one `call_id`, or all of a training `row`, with their texts."""
    p = await parts_for(request, rollout_id)
    calls = {call.call_id: call for call in await p.store.calls.of(rollout_id, short=True)}
    credit = {one.call_id: one for one in await p.store.credit.of(rollout_id)}
    if row is not None:
        runs = await _of_row(p, rollout_id, row, calls, credit)
    else:
        runs = [_answer(call, credit[name]) for name, call in calls.items() if call_id in (None, name)]
        if call_id is not None and not runs:
            raise NotFound(f"no call {call_id!r} in this rollout", param="call_id")
    tokens = [token for run in runs for token in run.token_ids]
    texts = await policy_texts(p, tokens) if tokens else None
    if texts is not None:
        ends = [sum(len(run.token_ids) for run in runs[: i + 1]) for i in range(len(runs))]
        runs = [replace(run, texts=texts[end - len(run.token_ids) : end]) for run, end in zip(runs, ends, strict=True)]
    return await large_response(lambda: {"data": [asdict(run) for run in runs]})


def _answer(call: ModelCall, credit: CallWithCredit) -> TokenRun:
    trained = credit.row is not None
    step, advantage = (credit.step, credit.advantage) if trained else (None, None)
    return TokenRun(call.call_id, call.seq, step, advantage, call.response_token_ids, call.logprobs)


async def _of_row(
    p: Parts, rollout_id: str, number: int, calls: dict[str, ModelCall], credit: dict[str, CallWithCredit]
) -> list[TokenRun]:
    rows = rows_of(await p.store.credit.tokens_of(rollout_id))
    found = next((row for row in rows if row.row == number), None)
    if found is None:
        raise NotFound(f"no training row {number} of this rollout", param="row")
    runs, before = list[TokenRun](), 0
    for call_id, start, end in sorted([*found.answers, *found.left_out], key=lambda one: one[1]):
        if start > before:
            runs.append(TokenRun(None, None, None, None, found.token_ids[before:start].tolist(), ()))
        runs.append(_answer(calls[call_id], credit[call_id]))
        before = end
    return runs
