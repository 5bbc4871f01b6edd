"""Power sampling of the base model that a vLLM serves, as a chat model of its own: `power:4`.

By routes of vLLM: `render` says which tokens the messages are, the ordinary chat completions go on with them and what
is kept of an answer (in `kv_transfer_params.prompt_token_ids`), and `derender` makes of the answer's tokens what vLLM
would have answered, tool calls included.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import orjson

from ..apis import sse
from ..config.upstreams import UpstreamConfig
from ..conversation.renderer import RENDER
from ..errors import InvalidRequest, Unsupported, UpstreamUnreachable
from ..gateway.asgi import Header
from ..gateway.ports import Answer as HttpAnswer
from ..json_text import encode, loads
from ..types import SAMPLING
from ..upstreams.attempts import Upstreams
from ..upstreams.http import Request
from .sampling import Answer, PowerSampler

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
DERENDER = "/v1/chat/completions/derender"
UNSAID = 16  # tokens: vLLM's default, which it leaves out of its sampling parameters
MAX_TOKENS = 3072  # of a request that names no limit: the paper's
_NAME = re.compile(r"power:(\d+(?:\.\d+)?)")
# What decides how p is sampled: the target has p as it is.
_PLAIN: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_WHOLE: Json = {
    "stream": False, "stream_options": None, "logprobs": True, "top_logprobs": 0, "return_token_ids": True,
}  # fmt: skip
_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def power_of(model: str | None) -> float | None:
    """The alpha of a model named `power:ALPHA`, above 1; None for any other name. Raises InvalidRequest."""
    found = _NAME.fullmatch(model or "")
    if found is None:
        return None
    if (alpha := float(found[1])) <= 1:
        raise InvalidRequest(f"{model}: the power must be above 1, which is the base model as it is", param="model")
    return alpha


class PowerCall:
    """One call for `power:ALPHA`; `open` answers it as an upstream does, all at once."""

    def __init__(self, upstreams: Upstreams, upstream: UpstreamConfig, alpha: float) -> None:
        self._upstreams = upstreams
        self._upstream = upstream
        self._alpha = alpha

    async def open(self, request: Request) -> HttpAnswer:
        """Raises InvalidRequest and Unsupported for what cannot be sampled like that; vLLM's refusals are answers."""
        if request.path != CHAT:
            raise Unsupported(f"power:{self._alpha:g} answers {CHAT} only, not {request.path}")
        body = loads(request.body)
        _check(body)
        try:
            return _as_asked(body, await self._answer(_Vllm(self._upstreams, self._upstream, request), body))
        except _Refused as refused:
            return refused.answer

    async def _answer(self, vllm: _Vllm, body: Json) -> Json:
        plain = {name: value for name, value in body.items() if name not in SAMPLING or name == "logit_bias"} | _PLAIN
        plain |= _WHOLE
        prompt, most = await vllm.rendered(plain)

        async def propose(beginning: Sequence[int], n: int, tokens: int) -> list[Answer]:
            return await vllm.endings(plain, [*prompt, *beginning], n, tokens)

        sampler = PowerSampler(propose, self._alpha, random.Random())
        answer = await sampler.sample(most if _limit(body) else min(most, MAX_TOKENS))
        made = await vllm.derendered(plain, prompt, answer)
        made["power_sampling"] = {
            "alpha": self._alpha, "moves": sampler.moves, "changes": sampler.changes, "sampled_tokens": sampler.sampled,
        }  # fmt: skip
        return made


class _Refused(Exception):
    """vLLM answered one of our requests with an error: the agent gets it."""

    def __init__(self, answer: MadeAnswer) -> None:
        self.answer = answer


class _Vllm:
    """The routes, asked with the credentials of the agent's request."""

    def __init__(self, upstreams: Upstreams, upstream: UpstreamConfig, request: Request) -> None:
        self._upstreams, self._upstream, self._request = upstreams, upstream, request

    async def rendered(self, body: Json) -> tuple[list[int], int]:
        """The prompt's tokens, and how many an answer may have."""
        found = await self._ask(RENDER, body)
        return found["token_ids"], found["sampling_params"].get("max_tokens", UNSAID)

    async def endings(self, body: Json, prompt: list[int], n: int, tokens: int) -> list[Answer]:
        """`n` answers to these tokens, sampled at temperature 1."""
        asked = {"kv_transfer_params": {"prompt_token_ids": prompt}, "n": n, "max_completion_tokens": tokens}
        found = await self._ask(CHAT, body | asked)
        if found.get("prompt_token_ids") != prompt:
            raise UpstreamUnreachable(f"upstream {self._upstream.name} does not take prompts as tokens: vLLM 0.32 does")
        return [_sampled(choice) for choice in found["choices"]]

    async def derendered(self, body: Json, prompt: list[int], answer: Answer) -> Json:
        """vLLM's answer of these tokens, in the shape of a chat completion with token ids and log-probabilities."""
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        choice = {
            "index": 0,
            # With a parser for tools, vLLM would write out the token that ended the answer.
            "token_ids": answer.said or answer.token_ids,
            "logprobs": {"content": [{"token_id": token, "logprob": value} for token, value in pairs]},
        }
        made = await self._ask(
            DERENDER,
            {
                "model": body.get("model"),
                "generate_response": {"request_id": f"chatcmpl-{uuid4().hex}", "choices": [choice]},
                "prompt_token_ids": prompt,
                "chat_request": body,
            },
        )
        (only,) = made["choices"]
        _finish(only, answer)
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(answer.token_ids)}
        return made | {"prompt_token_ids": prompt, "usage": counts | {"total_tokens": sum(counts.values())}}

    async def _ask(self, path: str, body: Json) -> Any:
        asked = self._request._replace(path=path, query=b"", body=encode(body), identity=True)
        answer = await self._upstreams.open(self._upstream, asked)
        try:
            raw = await answer.read()
        finally:
            answer.release()
        if answer.status in (403, 404, 405, 501) and path != CHAT:
            raise Unsupported(f"upstream {self._upstream.name} has no {path}: start its vLLM with --enable-scale-out")
        if answer.status != 200:
            raise _Refused(MadeAnswer(answer.status, answer.headers(keep_length=False), raw))
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise UpstreamUnreachable(f"upstream {self._upstream.name}: {path} does not answer JSON") from None


class MadeAnswer:
    """An answer that is there, whole."""

    retry_after = ""

    def __init__(self, status: int, headers: list[Header], body: bytes, *, is_stream: bool = False) -> None:
        self.status, self.is_stream = status, is_stream
        self._headers, self._body = headers, body

    def headers(self, *, keep_length: bool) -> list[Header]:
        return [*self._headers, (b"content-length", str(len(self._body)).encode())] if keep_length else self._headers

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def read(self) -> bytes:
        return self._body

    def release(self) -> None:
        """Nothing is held."""


def _check(body: Json) -> None:
    """Raises InvalidRequest for what a cut answer would not keep to."""
    shaped = body.get("response_format") not in (None, {"type": "text"})
    if shaped or body.get("tool_choice") not in (None, "auto", "none") or any(body.get(g) for g in _GRAMMARS):
        raise InvalidRequest("power sampling cannot keep to a grammar: no response_format, no tool_choice but auto")
    if body.get("n") not in (None, 1):
        raise InvalidRequest("power sampling gives one answer a request", param="n")


def _limit(body: Json) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens")


def _sampled(choice: Json) -> Answer:
    tokens = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    if not tokens or len(tokens) != len(logprobs):
        raise UpstreamUnreachable("power sampling: the upstream's token ids and log-probabilities do not match")
    stop = choice.get("stop_reason")
    return Answer(tuple(tokens), tuple(logprobs), choice["finish_reason"], stop if isinstance(stop, str) else None)


def _finish(choice: Json, answer: Answer) -> None:
    """What vLLM does to an answer that it sampled itself: how it ended, and without what ended it."""
    message = choice["message"]
    if not answer.said:
        message["content"] = ""
    elif answer.stop is not None and isinstance(text := message.get("content"), str):
        message["content"] = text.partition(answer.stop)[0]
    ended = "tool_calls" if message.get("tool_calls") else "stop"
    choice["finish_reason"] = ended if answer.ended else answer.finish_reason
    choice["token_ids"] = answer.token_ids


def _as_asked(body: Json, made: Json) -> MadeAnswer:
    """The answer as JSON, or for a request that wants a stream as one chunk."""
    if not body.get("stream"):
        return MadeAnswer(200, [(b"content-type", b"application/json")], orjson.dumps(made))
    same = {name: made.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = made["choices"]
    delta = {name: value for name, value in choice["message"].items() if value}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
    chunk = {name: value for name, value in choice.items() if name != "message"} | {"delta": delta}
    events = [same | {"choices": [chunk], "prompt_token_ids": made["prompt_token_ids"]}]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append(same | {"choices": [], "usage": made["usage"]})
    raw = b"".join(sse.encode(orjson.dumps(event)) for event in events) + sse.encode(b"[DONE]")
    return MadeAnswer(200, [(b"content-type", b"text/event-stream")], raw, is_stream=True)
