"""Checks the policy's vLLM server, without the proxy: its answers, and that it sees the directory of new weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from ...core.config.root import Config
from ...core.config.upstreams import UpstreamConfig
from ...proxy.gateway.exact import RENDER
from ...serving.mode import publish_mode
from ...serving.operator import key_file, operator_headers
from .checks import Doubt, Finding, Report

REFUSED = (401, 403)
RESTART = "start the server with `lightning-proxy vllm`"
QUESTION = [{"role": "user", "content": "What is two plus two?"}]
ANSWER = "The answer is four."
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHAT, LOAD, UNLOAD = "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# An adapter without weights: vLLM reads this file, then says that the tensors are missing.
ABOUT = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "bias": "none"}


class VllmChecks:
    """The checks of one vLLM server."""

    def __init__(self, config: Config, session: aiohttp.ClientSession, upstream: UpstreamConfig) -> None:
        self._config, self._session = config, session
        self._roots = [url.removesuffix("/v1") for url in upstream.published_to]
        self._headers = upstream.credentials | operator_headers(config.policy.directory)
        self._publish = publish_mode(config)
        self._model = ""

    async def run(self, report: Report) -> None:
        """Make each check; only the first if the server serves no model."""
        first = await report.check("policy server", self._length(), RESTART)
        if first.outcome == "failed":
            return
        await report.check("tokens", self._tokens(), RESTART)
        await report.check("logprobs", self._logprobs(), RESTART)
        await report.check("sampling", self._sampling(), RESTART)
        await report.check("template", self._template(), RESTART)
        await report.check("tools", self._tools(), RESTART)
        await report.check("publishing", self._publishing(), RESTART)
        await report.check("operator", self._operator(), RESTART)
        if self._publish == "lora":
            await report.check("shared directory", self._shared(), RESTART)

    async def _length(self) -> str:
        """Find the base model, and check that samples may be as long as its context."""
        status, answer = await self._send("GET", "/v1/models")
        served = answer["data"] if status < 400 else ()
        base = next((model for model in served if model.get("parent") is None), None)
        if base is None:
            raise Finding("lists no base model")
        self._model, length = base["id"], base.get("max_model_len")
        longest = self._config.trainer.max_sample_tokens
        if longest is not None and length is not None and length > longest:
            fix = f"raise trainer.max_sample_tokens to {length}, or set vllm.max_model_len"
            raise Doubt(f"{self._model} serves {length} tokens; samples over {longest} are dropped", fix)
        return f"{self._model} serves {length} tokens"

    async def _tokens(self) -> str:
        answer = await self._chat(max_tokens=4)
        choice = answer["choices"][0]
        # SGLang gives a prompt's ids in each choice.
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content") or []
        if not ids or not (answer.get("prompt_token_ids") or choice.get("prompt_token_ids")):
            raise Finding("no token ids come back", "use vLLM 0.10 or newer: return_token_ids is not understood")
        if not len(ids) == len(logprobs) == (wanted := answer["usage"]["completion_tokens"]):
            raise Finding(f"{len(ids)} token ids and {len(logprobs)} log-probabilities where usage says {wanted}")
        return "the server says which tokens it wrote, and how likely each was"

    async def _logprobs(self) -> str:
        """Halving the temperature doubles the gaps between log-probabilities taken after temperature."""
        tops = []
        for temperature in (1.0, 0.5):
            answer = await self._chat(max_tokens=1, temperature=temperature, top_logprobs=5)
            first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            # Tokens that cannot be sampled are left out.
            tops.append({entry["token"]: entry["logprob"] for entry in first if entry["logprob"] > -1000})
        warm, cold = tops
        common = sorted(warm.keys() & cold.keys(), key=lambda token: warm[token])
        if len(common) < 2 or (gap := warm[common[-1]] - warm[common[0]]) < 0.1:
            raise Doubt("cannot tell whether they are taken after temperature")
        if any(value > 0.001 for value in warm.values()):
            raise Finding("logits come back instead")
        if (cold[common[-1]] - cold[common[0]]) / gap < 1.5:
            fix = f"{RESTART}, or add --logprobs-mode processed_logprobs"
            raise Finding("they are taken before temperature, not from what was sampled", fix)
        return "taken after temperature, as training needs them"

    async def _sampling(self) -> str:
        """Check the route that says how an answer was sampled, and takes a next turn as tokens."""
        status, _ = await self._post(RENDER, messages=QUESTION)
        if status >= 400:
            found = f"{RENDER} answers HTTP {status}: calls with a grammar are not trained on"
            raise Doubt(f"{found}, policy.token_continuity cannot be exact", f"{RESTART}, or add --enable-scale-out")
        return "the server says how it samples"

    async def _template(self) -> str:
        """Check that a second turn's prompt begins with the first turn's prompt and the answer's tokens."""
        more = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And plus one?"}]
        asked = (
            {"messages": QUESTION, "add_generation_prompt": True},
            {"prompt": ANSWER, "add_special_tokens": False},
            {"messages": [*QUESTION, *more], "add_generation_prompt": True},
        )
        first, said, second = [list((await self._answer("/tokenize", **body))["tokens"]) for body in asked]
        if second[: len(first + said)] != first + said:
            fix = "give vLLM a --chat-template that leaves earlier turns as they were (slower, not wrong)"
            raise Doubt("a second turn changes tokens before it: a row for each call", fix)
        return "a second turn begins as the first one was: a conversation is trained on as one row"

    async def _tools(self) -> str:
        status, answer = await self._post(CHAT, messages=QUESTION, tools=[TOOL], max_tokens=1)
        if status < 400:
            return "a request with tools is answered"
        found = f"a request with tools gets HTTP {status}; agents without tools need not care ({str(answer)[:200]})"
        fix = "for others add --enable-auto-tool-choice --tool-call-parser NAME to vllm.extra_args (docs/agents.md)"
        raise Doubt(found, fix)

    async def _publishing(self) -> str:
        """Check the routes by which new weights are loaded, and that they are open to us."""
        lora = self._publish == "lora"
        for method, path in [("POST", LOAD)] if lora else [("GET", "/weight_info"), ("GET", "/is_paused")]:
            status, _ = await self._send(method, path, {} if lora else None)
            if status in REFUSED:
                key = key_file(self._config.policy.directory).absolute()
                fix = "run doctor where vLLM was started, or with the configuration that it was started with"
                raise Finding(f"the policy server does not know the key in {key}", fix)
            # An adapter without a name is refused where adapters can be loaded, and not found where they cannot.
            if lora and status in (404, 405):
                fix = f"{RESTART}, or set VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
                raise Finding("lora: adapters cannot be loaded", fix)
            if not lora and status >= 400:
                fix = f"{RESTART}, or set VLLM_SERVER_DEV_MODE=1 on a server that only this machine reaches"
                raise Finding(f"merged: {path} answers HTTP {status}", fix)
        return f"{self._publish}: new weights can be loaded while it serves"

    async def _operator(self) -> str:
        """Check that a web page could not use the routes that publishing needs."""
        method, path = ("POST", LOAD) if self._publish == "lora" else ("GET", "/is_paused")
        status, _ = await self._send(method, path, {}, {"Origin": "https://page.example"})
        if status in (*REFUSED, 404, 405):
            return "only we can change its weights"
        found = "a web page, or any program that reaches this vLLM, can replace its weights"
        raise Doubt(found, f"{RESTART}, or give it our guard (docs/security.md)")

    async def _shared(self) -> str:
        """Have each server look for an adapter in the directory of new weights. Nothing is loaded."""
        directory = self._config.policy.directory
        fix = "share policy.directory with the server, under the same path (docs/running.md)"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(prefix="doctor-", dir=directory.absolute())
        except OSError as error:
            raise Finding(f"{directory} cannot be written: {error.strerror}", "correct policy.directory") from None
        with made as path:
            Path(path, "adapter_config.json").write_text(json.dumps(ABOUT))
            for root in self._roots:
                adapter = {"lora_name": "lightning-doctor"}
                status, answer = await self._send("POST", LOAD, adapter | {"lora_path": path}, root=root)
                if status < 400:
                    await self._send("POST", UNLOAD, adapter, root=root)
                elif status == 404 or "No adapter found" in str(answer):
                    raise Finding(f"{root} does not see {directory.absolute()}: it can get no new weights", fix)
                elif "contain tensors" not in str(answer):
                    found = f"{root} cannot say whether it sees {directory}: HTTP {status} {str(answer)[:200]}"
                    raise Doubt(found, fix)
        return f"{', '.join(self._roots)} reads adapters from {directory}"

    async def _chat(self, **more: Any) -> Any:
        plain = {"messages": QUESTION, "logprobs": True, "top_p": 1.0, "top_k": 0}
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return await self._answer(CHAT, **plain, **ids, **more)

    async def _answer(self, path: str, **body: Any) -> Any:
        status, answer = await self._post(path, **body)
        if status >= 400:
            raise Finding(f"{path} answers HTTP {status}: {str(answer)[:200]}")
        return answer

    async def _post(self, path: str, **body: Any) -> tuple[int, Any]:
        return await self._send("POST", path, {"model": self._model, **body})

    async def _send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, root: str = ""
    ) -> tuple[int, Any]:
        """Return the answer's status and body. `headers`: in place of those with our keys; `root`: another server."""
        url, sent = (root or self._roots[0]) + path, self._headers if headers is None else headers
        async with self._session.request(method, url, json=body, headers=sent) as answer:
            is_json = "json" in answer.content_type
            return answer.status, await (answer.json() if is_json else answer.text())
