"""Serves the page, its feed, and sampled tokens with their texts. The page's files need no key."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from ...core.errors import NotFound
from ...proxy.api.bodies import Id, Listed, PathId
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.hooks import ProxyPlugin
from ...serving.mode import trained_model
from .. import FEATURES
from . import feed

router = APIRouter(include_in_schema=False)
rollouts = APIRouter(prefix="/rollouts", tags=["rollouts"], route_class=UserRoute)
FILES = Path(__file__).parent / "files"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag
}


@cache
def files() -> dict[str, bytes]:
    """Return the page's files and the views of features, by path. No other file is served."""
    own = {path.relative_to(FILES).as_posix(): path for path in sorted(FILES.rglob("*")) if path.suffix in TYPES}
    views = [path for name in FEATURES for path in sorted(FILES.parents[1].glob(f"{name}/views/*.mjs"))]
    imports = "".join(f'import * as {path.stem} from "./{path.name}";\n' for path in views)
    rooms = f"{imports}export const ROOMS = {{ {', '.join(path.stem for path in views)} }};\n"
    read = {name: path.read_bytes() for name, path in (own | {path.name: path for path in views}).items()}
    return read | {"views.mjs": rooms.encode()}


@router.get("/")
@router.get("/page/{name:path}")
async def get_file(request: Request, name: str = "index.html") -> Response:
    """The page, or a file that it loads."""
    body = files().get(name)
    if body is None:
        raise NotFound(f"no route {request.method} {request.url.path}")
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = HEADERS | {"ETag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=TYPES[Path(name).suffix])


@dataclass(slots=True)
class TokenRun:
    """The tokens of an answer. `texts` is null if they cannot be decoded, for example because the tokenizer is missing.

    If several tokens form one character, the last token has the text and the others have null.
    `step`, `advantage`: of the rollout's newest step; null if that did not train on the tokens.
    """

    call_id: str
    seq: int
    step: int | None
    advantage: float | None
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str | None] | None = None


@rollouts.get("/{rollout_id}/tokens", response_model=Listed[TokenRun])
async def get_tokens(request: ControlRequest, rollout_id: PathId, call_id: Id | None = None) -> dict[str, Any]:
    """The tokens of a rollout's answers, or of one `call_id`, with their texts."""
    p = request.parts
    credit = {one["call_id"]: one for one in await p.store.credit.of(rollout_id)}
    runs = list[TokenRun]()
    for call in await p.store.calls.of(rollout_id, short=True):
        if call_id in (None, call.call_id):
            of = credit[call.call_id]
            step, advantage = (None, None) if of["row"] is None else (of["step"], of["advantage"])
            runs.append(TokenRun(call.call_id, call.seq, step, advantage, call.response_token_ids, call.logprobs))
    if call_id is not None and not runs:
        raise NotFound(f"no call {call_id!r} in this rollout", param="call_id")
    if model := p.config.policy.model or trained_model(p.config.store):
        await asyncio.to_thread(_add_texts, model, runs)  # long answers would hold up the calls under way
    return {"data": runs}


def _add_texts(model: str, runs: Sequence[TokenRun]) -> None:
    try:
        from tokenizers.decoders import DecodeStream

        tokenizer = _tokenizer(model)
        for run in runs:
            stream = DecodeStream(skip_special_tokens=False)
            run.texts = [stream.step(tokenizer, token) for token in run.token_ids]
    except Exception:  # no such package or file, or unknown ids: the page shows ids
        return


@lru_cache(1)
def _tokenizer(model: str) -> Any:
    """The tokenizer in a directory, or of a model downloaded earlier."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    path = Path(model)
    file = path / "tokenizer.json" if path.is_dir() else try_to_load_from_cache(model, "tokenizer.json")
    return Tokenizer.from_file(str(file))


class PagePlugin(ProxyPlugin):
    routers = (feed.router, router, rollouts)


plugin = PagePlugin
