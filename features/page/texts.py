"""`GET /rollouts/{id}/tokens`: what was sampled as text, each token with its log-probability and its advantage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from ...core.config.root import Config
from ...core.errors import LightningError, NotFound
from ...proxy.api.bodies import Id, PathId
from ...proxy.api.requests import ControlRequest, Parts, UserRoute
from ...serving.mode import trained_model

router = APIRouter(prefix="/rollouts", tags=["rollouts"], route_class=UserRoute)
Ids = tuple[int, ...]
Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]
MARK = "␞␟␞"  # stands between tokens that are decoded together
BROKEN = "�"  # what decodes to it is a part of a character
LONGEST = 6  # tokens that may share characters; a character has at most four bytes
MOST = 4096  # different runs of them that are decoded: most texts have fewer, and noise would have five for each token
PATIENCE_S = 5.0


@dataclass(slots=True)
class TokenRun:
    """The tokens of an answer. `texts`: None at a token that ends a character which the one before begins.

    `advantage`: what the newest step trained them with, None if it did not.
    """

    call_id: str
    seq: int
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
async def get_tokens(request: ControlRequest, rollout_id: PathId, call_id: Id | None = None) -> TokenRuns:
    """The tokens of a rollout's answers, or of one `call_id`, with their texts."""
    p = request.parts
    calls = await p.store.calls.of(rollout_id, short=True)
    credit = {one["call_id"]: one for one in await p.store.credit.of(rollout_id)}
    runs = list[TokenRun]()
    for call in calls:
        if call_id in (None, call.call_id):
            of = credit[call.call_id]
            step, advantage = (None, None) if of["row"] is None else (of["step"], of["advantage"])
            runs.append(TokenRun(call.call_id, call.seq, step, advantage, call.response_token_ids, call.logprobs))
    if call_id is not None and not runs:
        raise NotFound(f"no call {call_id!r} in this rollout", param="call_id")
    tokens = [token for run in runs for token in run.token_ids]
    texts = await _policy_texts(p, tokens) if tokens else None
    if texts is not None:
        rest = iter(texts)
        for run in runs:
            run.texts = [*islice(rest, len(run.token_ids))]
    return TokenRuns(runs)


class Undecodable(Exception):
    """The tokenizer's texts cannot be told apart."""


def token_texts(token_ids: Sequence[int], decode: Decode, encode: Encode) -> list[str | None]:
    """Return each token's text. None: the token before it begins a character that this one ends, and has its text.

    Example: if "€" is three tokens, ids of "5 €" have the texts "5", " ", "€", None, None. Raise Undecodable.
    """
    mark = encode(MARK)
    known = _decoded([(token,) for token in dict.fromkeys(token_ids)], mark, decode)
    windows = [*islice(dict.fromkeys(_windows(token_ids, known)), MOST)]
    known |= _decoded(windows, mark, decode) if windows else {}
    texts = list[str | None]()
    while len(texts) < len(token_ids):
        tokens = tuple(token_ids[len(texts) : len(texts) + LONGEST])
        firsts = (tokens[:n] for n in range(1, len(tokens) + 1))
        whole = next((one for one in firsts if BROKEN not in known.get(one, BROKEN)), tokens[:1])
        texts += [known[whole], *[None] * (len(whole) - 1)]
    return texts


def _decoded(parts: Sequence[Ids], mark: Sequence[int], decode: Decode) -> dict[Ids, str]:
    """The text of each part, as it is inside a sequence: tokenizers may leave out a first blank."""
    first, twice = decode(mark), decode([*mark, *mark])
    between = twice[len(first) :]
    marked = decode([*mark, *(token for part in parts for token in (*part, *mark))])
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


async def _policy_texts(p: Parts, token_ids: Sequence[int]) -> list[str | None] | None:
    """Return the text of each token, by the policy's vLLM or else its model's files; None where neither is at hand.

    The work is done in a thread: long answers would hold up the calls under way.
    """
    if p.swap is not None and p.watch is not None:
        with suppress(LightningError, TimeoutError, Undecodable):
            async with asyncio.timeout(PATIENCE_S):
                server, loop = (await p.swap.vllm.reachable())[0], asyncio.get_running_loop()
                return await asyncio.to_thread(
                    token_texts,
                    token_ids,
                    lambda ids: asyncio.run_coroutine_threadsafe(server.decoded(ids), loop).result(),
                    lambda text: asyncio.run_coroutine_threadsafe(server.encoded(text), loop).result(),
                )
    with suppress(Undecodable, OverflowError):
        return await asyncio.to_thread(_by_files, p.config, token_ids)
    return None


def _by_files(config: Config, token_ids: Sequence[int]) -> list[str | None] | None:
    model = config.policy.model or trained_model(config.store)
    tokenizer = model and _loaded(model)
    if not tokenizer:
        return None
    return token_texts(
        token_ids,
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        lambda text: [*tokenizer.encode(text, add_special_tokens=False).ids],
    )


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
