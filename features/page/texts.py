"""`GET /rollouts/{id}/tokens`: what was sampled as text, each token with its log-probability and its advantage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from ...core.config.root import Config
from ...core.errors import LightningError, NotFound
from ...core.records import ModelCall
from ...proxy.api.bodies import Id, PathId
from ...proxy.api.requests import ControlRequest, Parts, UserRoute
from ...serving.mode import trained_model
from ...serving.vllm import VllmFleet
from ...store.database import Row

router = APIRouter(prefix="/rollouts", tags=["rollouts"], route_class=UserRoute)
Ids = tuple[int, ...]
Decode = Callable[[Sequence[int]], Awaitable[str]]
Encode = Callable[[str], Awaitable[list[int]]]
MARK = "␞␟␞"  # stands between tokens that are decoded together
BROKEN = "�"  # what decodes to it is a part of a character
LONGEST = 6  # tokens that may share characters; a character has at most four bytes
MOST = 4096  # different runs of them that are decoded: most texts have fewer, and noise would have five for each token
PATIENCE_S = 5.0


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


@dataclass
class TokenRuns:
    """`texts` is null where the policy's tokenizer is not at hand, and at a token that ends another's character."""

    data: list[TokenRun]


@router.get("/{rollout_id}/tokens", response_model=TokenRuns)
async def get_tokens(
    request: ControlRequest, rollout_id: PathId, call_id: Id | None = None, row: int | None = None
) -> TokenRuns:
    """The tokens of a rollout's answers, or of one `call_id`, or all of a training `row`, with their texts."""
    p = request.parts
    calls = {call.call_id: call for call in await p.store.calls.of(rollout_id, short=True)}
    credit = {one["call_id"]: one for one in await p.store.credit.of(rollout_id)}
    if row is not None:
        runs = _of_row(row, calls, credit)
    else:
        runs = [_answer(call, credit[name]) for name, call in calls.items() if call_id in (None, name)]
        if call_id is not None and not runs:
            raise NotFound(f"no call {call_id!r} in this rollout", param="call_id")
    tokens = [token for run in runs for token in run.token_ids]
    texts = await policy_texts(p, tokens) if tokens else None
    if texts is not None:
        ends = [sum(len(run.token_ids) for run in runs[: i + 1]) for i in range(len(runs))]
        runs = [replace(run, texts=texts[end - len(run.token_ids) : end]) for run, end in zip(runs, ends, strict=True)]
    return TokenRuns(runs)


def _answer(call: ModelCall, credit: Row) -> TokenRun:
    step, advantage = (None, None) if credit["row"] is None else (credit["step"], credit["advantage"])
    return TokenRun(call.call_id, call.seq, step, advantage, call.response_token_ids, call.logprobs)


def _of_row(number: int, calls: dict[str, ModelCall], credit: dict[str, Row]) -> list[TokenRun]:
    found = [name for name, one in credit.items() if one["row"] == number]
    if not found:
        raise NotFound(f"no training row {number} of this rollout", param="row")
    token_ids = _tokens(calls[found[-1]], calls)
    for name in (name for name, one in credit.items() if one["row"] is None):
        own = _tokens(calls[name], calls)
        if own == token_ids[: len(own)]:  # the row begins with it, and its answer is not trained on
            found.append(name)
    runs, before = list[TokenRun](), 0
    for name in sorted(found, key=lambda name: int(credit[name]["prompt"])):
        answer = credit[name]["prompt"]
        if answer > before:
            runs.append(TokenRun(None, None, None, None, token_ids[before:answer], ()))
        runs.append(_answer(calls[name], credit[name]))
        before = answer + credit[name]["answer"]
    return runs


def _tokens(call: ModelCall, calls: dict[str, ModelCall]) -> Ids:
    """All tokens of a short call, prompt and answer: those of its own, and before them its parents'."""
    parts, of = [call.row_token_ids], call.prompt_of
    shared = of["tokens"] if of else 0
    while of:
        call = calls[of["call_id"]]
        of = call.prompt_of
        above = of["tokens"] if of else 0
        parts.append(call.row_token_ids[: max(shared - above, 0)])
        shared = min(shared, above)
    return tuple(chain.from_iterable(reversed(parts)))


class Undecodable(Exception):
    """The tokenizer's texts cannot be told apart."""


async def token_texts(token_ids: Sequence[int], decode: Decode, encode: Encode) -> list[str | None]:
    """Return each token's text. None: the token before it begins a character that this one ends, and has its text.

    Example: if "€" is three tokens, ids of "5 €" have the texts "5", " ", "€", None, None. Raise Undecodable.
    """
    mark = await encode(MARK)
    alone = [(token,) for token in dict.fromkeys(token_ids)]
    known = await _decoded(alone, mark, decode)
    windows = [*islice(dict.fromkeys(_windows(token_ids, known)), MOST)]
    known |= await _decoded(windows, mark, decode) if windows else {}
    texts: list[str | None] = []
    while len(texts) < len(token_ids):
        window = _whole(token_ids[len(texts) : len(texts) + LONGEST], known)
        texts += [known[window], *[None] * (len(window) - 1)]
    return texts


async def _decoded(parts: Sequence[Ids], mark: Sequence[int], decode: Decode) -> dict[Ids, str]:
    """The text of each part, as it is inside a sequence: tokenizers may leave out a first blank."""
    first, twice = await decode(mark), await decode([*mark, *mark])
    between = twice[len(first) :]
    marked = await decode([*mark, *(token for part in parts for token in (*part, *mark))])
    texts = marked[len(first) :].split(between)
    if not between or len(texts) != len(parts) + 1:
        raise Undecodable
    return dict(zip(parts, texts, strict=False))


def _windows(token_ids: Sequence[int], known: dict[Ids, str]) -> Iterator[Ids]:
    """The tokens that may be a character together: several, none of them whole."""
    for start in range(len(token_ids)):
        for end in range(start + 1, min(start + LONGEST, len(token_ids)) + 1):
            if BROKEN not in known[(token_ids[end - 1],)]:
                break
            if end > start + 1:
                yield tuple(token_ids[start:end])


def _whole(token_ids: Sequence[int], known: dict[Ids, str]) -> Ids:
    """The fewest of the first tokens that have whole characters together, or the first alone."""
    tokens = tuple(token_ids)
    windows = (tokens[:n] for n in range(1, len(tokens) + 1))
    return next((one for one in windows if BROKEN not in known.get(one, BROKEN)), tokens[:1])


async def policy_texts(p: Parts, token_ids: Sequence[int]) -> list[str | None] | None:
    """Return the text of each token, as `token_texts` does; None where no tokenizer is at hand."""
    if p.swap is not None and p.watch is not None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await _from_vllm(p.swap.vllm, token_ids)
        except (LightningError, TimeoutError, Undecodable):
            pass
    return await asyncio.to_thread(_from_files, p.config, token_ids)


async def _from_vllm(vllm: VllmFleet, token_ids: Sequence[int]) -> list[str | None]:
    """Ask a server from here, and find the texts in a thread: long answers would hold up the calls under way."""
    server, loop = (await vllm.reachable())[0], asyncio.get_running_loop()

    async def decode(ids: Sequence[int]) -> str:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.decoded(ids), loop))

    async def encode(text: str) -> list[int]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.encoded(text), loop))

    return await asyncio.to_thread(lambda: asyncio.run(token_texts(token_ids, decode, encode)))


def _from_files(config: Config, token_ids: Sequence[int]) -> list[str | None] | None:
    model = config.policy.model or trained_model(config.store)
    tokenizer = None if model is None else _loaded(model)
    if tokenizer is None:
        return None

    async def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    async def encode(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False).ids]

    try:
        return asyncio.run(token_texts(token_ids, decode, encode))
    except (Undecodable, OverflowError):
        return None


@lru_cache(1)
def _loaded(model: str) -> Any:
    """The tokenizer of a directory or of a model that was fetched before; None without it."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from tokenizers import Tokenizer

        path = Path(model)
        file = path / "tokenizer.json" if path.is_dir() else try_to_load_from_cache(model, "tokenizer.json")
        return Tokenizer.from_file(str(file)) if isinstance(file, str | Path) else None
    except Exception:  # no such package or file, or one that it cannot read: ids are shown
        return None
