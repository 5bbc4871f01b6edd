"""Checks the policy's vLLM server, without the proxy: its answers, and that it sees the directory of new weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from ...core.config.root import Config
from ...core.config.upstreams import UpstreamConfig
from ...core.records import PublishMode
from ...proxy.gateway.exact import RENDER
from ...serving.operator import key_file, operator_headers
from ...trainer.rows.sampling import is_installed, sampling_of
from ...trainer.types import Sampling
from .checks import Check, failed, ok, warning
from .proxy import REFUSED

RESTART = "start the server with `lightning-proxy vllm`"
QUESTION = [{"role": "user", "content": "What is two plus two?"}]
ANSWER = "The answer is four."
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TOP = 5
# The sampling parameters for which a model's generation configuration may have defaults.
SHOWN = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
# What reading an answer raises that has another shape than vLLM's.
OTHER_SHAPE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)

SHARED = "shared directory"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER = "lightning-doctor"
# An adapter without weights: vLLM reads this file, then says that the tensors are missing.
ABOUT = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "bias": "none"}
NO_TENSORS, NOT_FOUND = "contain tensors", "No adapter found"
# Method, path and body to status and answer.
Send = Callable[[str, str, Any], Awaitable[tuple[int, Any]]]


class ServerRefused(Exception):
    """The server answered with an error, or not at all."""


class VllmChecks:
    """Runs the checks of one vLLM server. `all()` yields each after those that it needs."""

    def __init__(
        self, config: Config, session: aiohttp.ClientSession, upstream: UpstreamConfig, publish: PublishMode
    ) -> None:
        self._config = config
        self._session = session
        self._roots = [url.removesuffix("/v1") for url in upstream.published_to]
        self._root = self._roots[0]
        self._headers = upstream.credentials | operator_headers(config.policy.directory)
        self._publish = publish
        self._model = ""

    async def all(self) -> AsyncIterator[Check]:
        try:
            served = (await self._request("GET", "/v1/models"))["data"]
            base = next(model for model in served if model.get("parent") is None)
            self._model, length = base["id"], base.get("max_model_len")
        except ServerRefused as error:
            yield failed("policy server", f"lists no base model: {error}", RESTART)
            return
        except (StopIteration, *OTHER_SHAPE):
            yield failed("policy server", "lists no base model: /v1/models does not answer as vLLM does", RESTART)
            return
        yield self._context(length if isinstance(length, int) else None)
        checks = (
            ("tokens", self._tokens), ("logprobs", self._logprobs), ("sampling", self._sampling),
            ("template", self._template), ("tools", self._tools),
        )  # fmt: skip
        exact = self._config.policy.token_continuity == "exact"
        continuity = (("continuity", self._continuity),) if exact else ()
        publishing: tuple[tuple[str, Callable[[str], Awaitable[Check]]], ...]
        publishing = (("publishing", self._publishing), ("operator", self._operator))
        if self._publish == "lora":
            publishing = (*publishing, (SHARED, self._shared))
        for name, check in (*checks, *continuity, *publishing):
            try:
                yield await check(name)
            except ServerRefused as error:
                yield failed(name, f"the policy server does not answer as expected: {error}", RESTART)
            except OTHER_SHAPE:
                yield failed(name, "the policy server's answers have another shape than vLLM's", RESTART)

    def _context(self, length: int | None) -> Check:
        name, longest = "context length", self._config.trainer.max_sample_tokens
        if length is None:
            return warning(name, "the policy server does not say", "use vLLM")
        if longest is not None and length > longest:
            fix = f"raise trainer.max_sample_tokens to {length}, or set vllm.max_model_len"
            return warning(name, f"{self._model} serves {length} tokens; samples over {longest} are dropped", fix)
        return ok(name, f"{self._model} serves {length} tokens")

    async def _tokens(self, name: str) -> Check:
        answer = await self._chat(max_tokens=4)
        choice = answer["choices"][0]
        # SGLang gives a prompt's ids in each choice.
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
        if not ids or not (answer.get("prompt_token_ids") or choice.get("prompt_token_ids")):
            return failed(name, "no token ids come back", "use vLLM 0.10 or newer: return_token_ids is not understood")
        if not logprobs or len(logprobs) != len(ids):
            return failed(name, f"{len(ids)} token ids, {len(logprobs or [])} log-probabilities", RESTART)
        wanted = answer["usage"]["completion_tokens"]
        if len(ids) != wanted:
            return failed(name, f"{len(ids)} token ids where usage says {wanted}", "use another vLLM version")
        return ok(name, "the server says which tokens it wrote, and how likely each was")

    async def _logprobs(self, name: str) -> Check:
        """Halving the temperature doubles the gaps between log-probabilities taken after temperature."""
        warm, cold = [_top(await self._chat(max_tokens=1, temperature=t, top_logprobs=TOP)) for t in (1.0, 0.5)]
        common = sorted(warm.keys() & cold.keys(), key=lambda token: warm[token])
        if len(common) < 2 or (gap := warm[common[-1]] - warm[common[0]]) < 0.1:
            return warning(name, "cannot tell whether they are taken after temperature", RESTART)
        if any(value > 0.001 for value in warm.values()):
            return failed(name, "logits come back instead", RESTART)
        ratio = (cold[common[-1]] - cold[common[0]]) / gap
        if ratio < 1.5:
            fix = f"{RESTART}, or add --logprobs-mode processed_logprobs"
            return failed(name, "they are taken before temperature, not from what was sampled", fix)
        return ok(name, "taken after temperature, as training needs them")

    async def _sampling(self, name: str) -> Check:
        """Check that the trainer can read how an answer was sampled, and show the server's own defaults."""
        status, rendered = await self._send("POST", RENDER, {"model": self._model, "messages": QUESTION})
        if status >= 400 or "sampling_params" not in rendered:
            found = "the server does not say how it samples: calls with a grammar are not trained on"
            return warning(name, found, f"{RESTART}, or add --enable-scale-out")
        if not is_installed():
            found = "xgrammar is missing: calls with a grammar are not trained on"
            return warning(name, found, "pip install xgrammar beside the trainer; it comes with vLLM")
        own, plain = sampling_of(rendered["sampling_params"]), Sampling()
        changed = [f"{f.name} {getattr(own, f.name)}" for f in fields(plain) if f.name in SHOWN and own is not None
                   and getattr(own, f.name) != getattr(plain, f.name)]  # fmt: skip
        if changed:
            return ok(name, f"by the server's own defaults: {', '.join(changed)}; the trainer reckons with them")
        return ok(name, "as requests say, without defaults of the server's own")

    async def _template(self, name: str) -> Check:
        """Check that a second turn's prompt begins with the first turn's prompt and the answer's tokens."""
        first = await self._tokenize(messages=QUESTION, add_generation_prompt=True)
        answer = await self._tokenize(prompt=ANSWER, add_special_tokens=False)
        more = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And plus one?"}]
        second = await self._tokenize(messages=[*QUESTION, *more], add_generation_prompt=True)
        turn = first + answer
        same = next((i for i, (a, b) in enumerate(zip(turn, second, strict=False)) if a != b), len(second))
        if same >= len(turn):
            return ok(name, "a second turn begins as the first one was: a conversation is trained on as one row")
        found = f"a second turn changes token {same + 1} of the {len(turn)} before it: a row for each call"
        fix = "give vLLM a --chat-template that leaves earlier turns as they were (slower, not wrong)"
        return warning(name, found, fix)

    async def _tools(self, name: str) -> Check:
        """Check that a request with tools is answered."""
        body = {"model": self._model, "messages": QUESTION, "tools": [TOOL], "max_tokens": 1}
        status, answer = await self._send("POST", "/v1/chat/completions", body)
        if status < 400:
            return ok(name, "a request with tools is answered")
        found = f"a request with tools gets HTTP {status}; agents without tools need not care"
        if "tool" in str(answer).lower():
            fix = "for others add --enable-auto-tool-choice --tool-call-parser NAME to vllm.extra_args (docs/agents.md)"
            return warning(name, found, fix)
        return warning(name, f"{found} ({str(answer)[:200]})", "look at vLLM's log")

    async def _continuity(self, name: str) -> Check:
        """Check the two routes that `policy.token_continuity: exact` needs."""
        status, rendered = await self._send("POST", RENDER, {"model": self._model, "messages": QUESTION})
        if status in (403, 404, 405):
            return failed(name, f"{RENDER} answers HTTP {status}", f"{RESTART}, or add --enable-scale-out")
        if status >= 400:
            raise ServerRefused(f"{RENDER} answers HTTP {status}: {str(rendered)[:200]}")
        prompt = rendered["token_ids"][:-1]  # other tokens than the messages have
        answer = await self._chat(max_tokens=1, kv_transfer_params={"prompt_token_ids": prompt})
        if answer.get("prompt_token_ids") != prompt:
            return failed(name, "prompts are not taken as tokens", "use vLLM 0.32 or newer")
        return ok(name, "exact: a next turn can be sent as the last one's tokens")

    async def _publishing(self, name: str) -> Check:
        """Check the routes by which new weights are loaded, and that they are open to us."""
        if self._publish == "lora":
            # Without a body it is refused where adapters can be loaded, and not found where they cannot.
            status, _ = await self._send("POST", "/v1/load_lora_adapter", {})
            if status in REFUSED:
                return self._other_key(name)
            if status in (404, 405):
                fix = f"{RESTART}, or set VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
                return failed(name, "lora: adapters cannot be loaded", fix)
            return ok(name, "lora: new weights can be loaded while the old ones serve")
        for path in ("/weight_info", "/is_paused"):
            status, _ = await self._send("GET", path)
            if status in REFUSED:
                return self._other_key(name)
            if status >= 400:
                fix = f"{RESTART}, or set VLLM_SERVER_DEV_MODE=1 on a server that only this machine reaches"
                return failed(name, f"merged: {path} answers HTTP {status}", fix)
        return ok(name, "merged: weights can be replaced while it serves")

    def _other_key(self, name: str) -> Check:
        key = key_file(self._config.policy.directory).absolute()
        fix = "run doctor where vLLM was started, or with the configuration that it was started with"
        return failed(name, f"the policy server does not know the key in {key}", fix)

    async def _shared(self, name: str) -> Check:
        """Check that every server that answers sees where new weights are written; the first that does not counts."""
        found = []
        for root in self._roots:
            try:
                found.append(await check_shared(self._config.policy.directory, root, partial(self._send, root=root)))
            except ServerRefused:
                if root == self._root:
                    raise
        return next((check for check in found if check.outcome != "ok"), found[0])

    async def _operator(self, name: str) -> Check:
        """Check that a web page could not use the routes that publishing needs."""
        method, path = ("POST", "/v1/load_lora_adapter") if self._publish == "lora" else ("GET", "/is_paused")
        status, _ = await self._send(method, path, {}, {"Origin": "https://page.example"})
        if status in (401, 403):
            return ok(name, "only we can change its weights")
        if status in (404, 405):
            return ok(name, "nothing that reaches it can change its weights")
        found = "a web page, or any program that reaches this vLLM, can replace its weights"
        return warning(name, found, f"{RESTART}, or give it our guard (docs/security.md)")

    async def _chat(self, **more: Any) -> dict[str, Any]:
        body = {"model": self._model, "messages": QUESTION, "logprobs": True, "return_token_ids": True}
        more |= {"return_tokens_as_token_ids": True, "top_p": 1.0, "top_k": 0}
        answer: dict[str, Any] = await self._request("POST", "/v1/chat/completions", body | more)
        return answer

    async def _tokenize(self, **body: Any) -> list[int]:
        answer = await self._request("POST", "/tokenize", {"model": self._model, **body})
        return list(answer["tokens"])

    async def _request(self, method: str, path: str, body: Any = None) -> Any:
        status, answer = await self._send(method, path, body)
        if status >= 400:
            raise ServerRefused(f"{path} answers HTTP {status}: {str(answer)[:200]}")
        return answer

    async def _send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, root: str = ""
    ) -> tuple[int, Any]:
        """The answer's status and body. `headers`: in place of those with our keys; `root`: another server."""
        url, sent = (root or self._root) + path, self._headers if headers is None else headers
        try:
            async with self._session.request(method, url, json=body, headers=sent) as answer:
                is_json = "json" in answer.content_type
                return answer.status, await (answer.json() if is_json else answer.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ServerRefused(f"{path}: {error or 'no answer in time'}") from None


def _top(answer: dict[str, Any]) -> dict[str, float]:
    """The most likely first tokens and their log-probabilities, without those that cannot be sampled."""
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {entry["token"]: entry["logprob"] for entry in top if entry["logprob"] > -1000}


async def check_shared(directory: Path, where: str, send: Send) -> Check:
    """Have the server at `where` look for an adapter in `directory`. Nothing is loaded."""
    fix = "share policy.directory with the server, under the same path (docs/running.md)"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="doctor-", dir=directory.absolute())
    except OSError as error:
        return failed(SHARED, f"{directory} cannot be written: {error.strerror}", "correct policy.directory")
    with made as path:
        Path(path, "adapter_config.json").write_text(json.dumps(ABOUT))
        status, answer = await send("POST", LOAD, {"lora_name": ADAPTER, "lora_path": path})
        if status < 400:
            await send("POST", UNLOAD, {"lora_name": ADAPTER})
    if status < 400 or NO_TENSORS in str(answer):
        return ok(SHARED, f"{where} reads adapters from {directory}")
    if status == 404 or NOT_FOUND in str(answer):
        return failed(SHARED, f"{where} does not see {directory.absolute()}: it can get no new weights", fix)
    return warning(SHARED, f"{where} cannot say whether it sees {directory}: HTTP {status} {str(answer)[:200]}", fix)
