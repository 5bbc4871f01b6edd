"""Answers chat completions for `power:ALPHA`, sampled from the base model that a vLLM serves.

It uses routes of vLLM: `render` returns the tokens of the messages. The ordinary chat completions continue these and
the kept part of an answer (in `kv_transfer_params.prompt_token_ids`). `derender` makes vLLM's own answer of the
answer's tokens, tool calls included.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import aiohttp
import orjson

from ...proxy.apis import sse
from ...proxy.config.address import without_secrets
from ...proxy.conversation.renderer import RENDER
from ...proxy.errors import InvalidRequest, NotFound, Unsupported, UpstreamTimeout, UpstreamUnreachable
from ...proxy.json_text import encode
from ...proxy.policy.vllm import LOADING, VllmError, VllmServer
from ...proxy.types import SAMPLING
from .sampling import PowerSampler, SampledAnswer

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
DERENDER = "/v1/chat/completions/derender"
DEFAULT_MAX_TOKENS = 16  # tokens: vLLM's default, which it leaves out of its sampling parameters
MAX_TOKENS = 3072  # of a request that names no limit: the paper's
TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=5)  # of each of the many requests to vLLM
_NAME = re.compile(r"power:(\d+(?:\.\d+)?)")
# What decides how p is sampled: the target has p as it is.
_PLAIN: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_NON_STREAMED: Json = {
    "stream": False, "stream_options": None, "logprobs": True, "top_logprobs": 0, "return_token_ids": True,
}  # fmt: skip
_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def power_of(model: object) -> float | None:
    """Return the alpha of a model named `power:ALPHA`, above 1; None for any other name. Raise InvalidRequest."""
    match = _NAME.fullmatch(model) if isinstance(model, str) else None
    if match is None:
        return None
    if (alpha := float(match[1])) <= 1:
        raise InvalidRequest(f"{model}: the power must be above 1, which is the base model as it is", param="model")
    return alpha


class BufferedAnswer(NamedTuple):
    """An answer in one piece."""

    status: int
    content_type: str
    body: bytes


class PowerChat:
    """Answers requests for `power:ALPHA`, each with an answer in one piece."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        """`base_url`: of the vLLM, ending in /v1."""
        self._session = session
        self._base_url = base_url

    async def answer(self, body: Json, headers: Mapping[str, str]) -> BufferedAnswer:
        """Return the answer to a request's body. vLLM gets `headers`, which carry the key that it may want.

        Raises NotFound, InvalidRequest and Unsupported where it cannot be sampled; vLLM's own refusals are answers.
        """
        alpha = power_of(body.get("model"))
        if alpha is None:
            raise NotFound(f"no such model: {body.get('model')!r}; the models here are power:ALPHA", param="model")
        _check(body)
        vllm = _Vllm(self._session, self._base_url, headers)
        try:
            return _as_json_or_chunk(body, await _sample(vllm, body | {"model": await vllm.base_model(alpha)}, alpha))
        except _Refused as refused:
            return refused.answer


async def _sample(vllm: _Vllm, body: Json, alpha: float) -> Json:
    plain = {name: value for name, value in body.items() if name not in SAMPLING or name == "logit_bias"} | _PLAIN
    plain |= _NON_STREAMED
    prompt, most = await vllm.rendered(plain)

    async def propose(beginning: Sequence[int], n: int, tokens: int) -> list[SampledAnswer]:
        return await vllm.endings(plain, [*prompt, *beginning], n, tokens)

    sampler = PowerSampler(propose, alpha, random.Random())
    answer = await sampler.sample(most if _limit(body) else min(most, MAX_TOKENS))
    completion = await vllm.derendered(plain, prompt, answer)
    completion["power_sampling"] = {
        "alpha": alpha, "moves": sampler.moves, "changes": sampler.changes, "sampled_tokens": sampler.sampled,
    }  # fmt: skip
    return completion


class _Refused(Exception):
    """vLLM answered one of our requests with an error: the agent gets it."""

    def __init__(self, answer: BufferedAnswer) -> None:
        self.answer = answer


class _Vllm:
    """The routes of vLLM that sampling needs."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]) -> None:
        self._session, self._headers = session, headers
        self._operator = VllmServer(session, base_url, headers)
        self._root = base_url.rstrip("/").removesuffix("/v1")

    async def base_model(self, alpha: float) -> str:
        """Return the name of the base model.

        Raises NotFound while trained weights are served in its place, UpstreamUnreachable while others are loaded.
        """
        try:
            label = await self._operator.weight_version()
        except VllmError:  # without this route nothing can have replaced its weights
            label = "default"
        if label == LOADING:
            raise UpstreamUnreachable("vLLM is loading other weights: ask again")
        if label != "default" and not label.startswith("0-"):
            version = label.partition("-")[0]
            raise NotFound(f"power:{alpha:g} samples from the base model, and version {version} is in its place")
        return await self._operator.base_model()

    async def rendered(self, body: Json) -> tuple[list[int], int]:
        """Return the prompt's tokens, and how many an answer may have."""
        prompt = await self._ask(RENDER, body)
        return prompt["token_ids"], prompt["sampling_params"].get("max_tokens", DEFAULT_MAX_TOKENS)

    async def endings(self, body: Json, prompt: list[int], n: int, tokens: int) -> list[SampledAnswer]:
        """`n` answers to these tokens, sampled at temperature 1."""
        options = {"kv_transfer_params": {"prompt_token_ids": prompt}, "n": n, "max_completion_tokens": tokens}
        completion = await self._ask(CHAT, body | options)
        if completion.get("prompt_token_ids") != prompt:
            raise UpstreamUnreachable("power sampling: vLLM does not take prompts as tokens; vLLM 0.32 does")
        return [_sampled(choice) for choice in completion["choices"]]

    async def derendered(self, body: Json, prompt: list[int], answer: SampledAnswer) -> Json:
        """vLLM's answer of these tokens, in the shape of a chat completion with token ids and log-probabilities."""
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        choice = {
            "index": 0,
            # With a parser for tools, vLLM would write out the token that ended the answer.
            "token_ids": answer.content_ids or answer.token_ids,
            "logprobs": {"content": [{"token_id": token, "logprob": value} for token, value in pairs]},
        }
        completion = await self._ask(
            DERENDER,
            {
                "model": body["model"],
                "generate_response": {"request_id": f"chatcmpl-{uuid4().hex}", "choices": [choice]},
                "prompt_token_ids": prompt,
                "chat_request": body,
            },
        )
        (only,) = completion["choices"]
        _finish(only, answer)
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(answer.token_ids)}
        return completion | {"prompt_token_ids": prompt, "usage": counts | {"total_tokens": sum(counts.values())}}

    async def _ask(self, path: str, body: Json) -> Any:
        headers = {"content-type": "application/json", **self._headers}
        url = self._root + path
        try:
            async with self._session.post(url, data=encode(body), headers=headers, timeout=TIMEOUT) as answer:
                raw, content_type = await answer.read(), answer.headers.get("content-type", "")
        except TimeoutError as error:
            raise UpstreamTimeout("power sampling: vLLM did not answer in time") from error
        except aiohttp.ClientError as error:
            raise UpstreamUnreachable(f"power sampling: vLLM is not reachable: {without_secrets(str(error))}") from None
        if answer.status in (403, 404, 405, 501) and path != CHAT:
            raise Unsupported(f"power sampling: vLLM has no {path}: start it with --enable-scale-out")
        if answer.status != 200:
            raise _Refused(BufferedAnswer(answer.status, content_type, raw))
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise UpstreamUnreachable(f"power sampling: vLLM's {path} does not answer JSON") from None


def _check(body: Json) -> None:
    """Raise InvalidRequest for fields that a cut answer could not obey."""
    shaped = body.get("response_format") not in (None, {"type": "text"})
    if shaped or body.get("tool_choice") not in (None, "auto", "none") or any(body.get(g) for g in _GRAMMARS):
        raise InvalidRequest("power sampling cannot keep to a grammar: no response_format, no tool_choice but auto")
    if body.get("n") not in (None, 1):
        raise InvalidRequest("power sampling gives one answer a request", param="n")


def _limit(body: Json) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens")


def _sampled(choice: Json) -> SampledAnswer:
    tokens = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    if not tokens or len(tokens) != len(logprobs):
        raise UpstreamUnreachable("power sampling: the upstream's token ids and log-probabilities do not match")
    stop = choice.get("stop_reason")
    return SampledAnswer(
        tuple(tokens), tuple(logprobs), choice["finish_reason"], stop if isinstance(stop, str) else None
    )


def _finish(choice: Json, answer: SampledAnswer) -> None:
    """Finish an answer as vLLM does its own: set how it ended, and remove the text that ended it."""
    message = choice["message"]
    if not answer.content_ids:
        message["content"] = ""
    elif answer.stop is not None and isinstance(text := message.get("content"), str):
        message["content"] = text.partition(answer.stop)[0]
    ended = "tool_calls" if message.get("tool_calls") else "stop"
    choice["finish_reason"] = ended if answer.ended else answer.finish_reason
    choice["token_ids"] = answer.token_ids


def _as_json_or_chunk(body: Json, completion: Json) -> BufferedAnswer:
    """The answer as JSON, or for a request that wants a stream as one chunk."""
    if not body.get("stream"):
        return BufferedAnswer(200, "application/json", orjson.dumps(completion))
    same = {name: completion.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = completion["choices"]
    delta = {name: value for name, value in choice["message"].items() if value}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
    chunk = {name: value for name, value in choice.items() if name != "message"} | {"delta": delta}
    events = [same | {"choices": [chunk], "prompt_token_ids": completion["prompt_token_ids"]}]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append(same | {"choices": [], "usage": completion["usage"]})
    raw = b"".join(sse.encode(orjson.dumps(event)) for event in events) + sse.encode(b"[DONE]")
    return BufferedAnswer(200, "text/event-stream", raw)
