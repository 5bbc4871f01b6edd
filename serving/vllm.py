"""Clients of the policy's vLLM servers: operator routes (adapters, weights, pauses), samples and scores."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from ..core.config.address import shown
from ..core.config.root import Config
from ..core.errors import LightningError, UpstreamTimeout, UpstreamUnreachable
from ..core.http import why_it_failed
from .operator import operator_headers
from .vllm_worker import RELOAD

LOADING = "loading"  # the label of the weights while they are replaced
PROBE_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]  # tokens that every vocabulary has
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\d+)", re.MULTILINE)
_USAGE_CHUNK = re.compile(r'"choices": ?\[\].*"usage": ?\{')
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

T = TypeVar("T")


class VllmError(LightningError):
    """vLLM refused our request, or its answer cannot be used."""

    status = 502
    type = "upstream_error"


class VllmFault(VllmError):
    """vLLM had an internal error (5xx). It may be shutting down while still listing its models."""


AWAY = (UpstreamUnreachable, UpstreamTimeout)


def operator_session() -> ClientSession:
    """Return a session for the classes below. It closes idle connections after 4 s, because vLLM does so after 5 s."""
    return ClientSession(connector=TCPConnector(keepalive_timeout=4))


@dataclass(frozen=True, slots=True, eq=False)
class VllmServer:
    """One vLLM server. `model`: the preferred name of the base model."""

    session: ClientSession
    base_url: str
    headers: Mapping[str, str]
    model: str | None = None
    timeout_s: float = 120.0

    async def models(self) -> list[dict[str, Any]]:
        """Return the served models: the base model, which has `parent` None, and the adapters."""
        return await self._read("/v1/models", lambda a: [dict(m) for m in a["data"] if isinstance(m["id"], str)])

    async def base_model(self) -> str:
        """Return the name under which the base model is served, or the configured name if the server does not say."""
        try:
            names = [model["id"] for model in await self.models() if model.get("parent") is None]
        except VllmError as error:
            if self.model is None or isinstance(error, VllmFault):
                raise
            return self.model
        if not names:
            raise VllmError(f"{shown(self.base_url)}/models lists no base model")
        return str(self.model if self.model in names else names[0])

    async def adapters(self) -> dict[str, str | None]:
        """Return the path that each model was loaded from, by name; None if the server does not say."""
        return {model["id"]: model.get("root") for model in await self.models()}

    async def load_adapters(self, adapters: Mapping[str, str]) -> None:
        """Load the LoRA adapters (paths by name) that are not served yet, replacing others of the same name."""
        served = await self.adapters() if adapters else {}
        for name, path in adapters.items():
            if (root := served.get(name, "")) not in (path, None):
                body = {"lora_name": name, "lora_path": path} | ({"load_inplace": True} if root else {})
                await self._send("/v1/load_lora_adapter", body)

    async def unload_adapters(self, names: Collection[str]) -> None:
        served = await self.adapters() if names else {}
        for name in filter(served.__contains__, names):
            await self._send("/v1/unload_lora_adapter", {"lora_name": name})

    async def weight_version(self) -> str:
        """Return the label of the weights being served; `default` after a start."""
        return await self._read("/weight_info", lambda answer: str(answer["weight_version"]))

    async def is_paused(self) -> bool:
        return await self._read("/is_paused", lambda answer: bool(answer["is_paused"]))

    async def resume(self) -> None:
        await self._send("/resume")

    async def load_weights(self, path: str) -> None:
        """Freeze running requests, and load the weights at `path` under the label `loading`."""
        await self._send("/pause?mode=keep")
        await self.name_weights(LOADING)
        where = {"kwargs": {"weights_path": path}}
        try:
            await self._send("/collective_rpc", {"method": RELOAD, **where})
        except VllmFault:  # a vLLM that somebody else has started may have only its own method
            await self._send("/collective_rpc", {"method": "reload_weights", **where})
        await self._send("/reset_prefix_cache")

    async def go_on(self, label: str) -> None:
        """Label the loaded weights, and resume the frozen requests."""
        await self.name_weights(label)
        await self.resume()

    async def name_weights(self, label: str) -> None:
        await self._send("/update_weight_version", {"new_version": label})

    async def requests(self) -> int:
        try:
            return sum(map(int, _REQUESTS.findall(await self._send("/metrics", method="GET"))))
        except VllmError:
            return 0

    async def sample(self, model: str, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Sample up to `tokens` tokens at temperature 1; return their ids and their log-probabilities."""

        def read(choice: Any) -> tuple[list[int], list[float]]:
            return [*map(int, choice["token_ids"])], [*map(float, choice["logprobs"]["token_logprobs"])]

        asked = {"max_tokens": tokens, "logprobs": 0, "return_token_ids": True} | _PLAIN
        return await self._complete(model, [*prompt], asked, read)

    async def probe(self, model: str) -> list[tuple[str, dict[str, float]]]:
        """Sample with a fixed seed and prompt. Return each token with the log-probabilities of likely tokens there."""

        def read(choice: Any) -> list[tuple[str, dict[str, float]]]:
            likely = choice["logprobs"]["top_logprobs"]
            top = [{str(token): float(value) for token, value in found.items()} for found in likely]
            return [*zip(map(str, choice["logprobs"]["tokens"]), top, strict=True)]

        asked = {"max_tokens": 16, "ignore_eos": True, "seed": 0, "logprobs": 5, "return_tokens_as_token_ids": True}
        return await self._complete(model, PROBE_PROMPT, asked | _PLAIN, read)

    async def tokens(self, model: str, text: str) -> list[int]:
        """Return a string's token ids; special tokens only where the string has them."""
        asked = {"add_special_tokens": False, "return_token_ids": True}
        return await self._complete(model, text, asked, lambda choice: [*map(int, choice["prompt_token_ids"])])

    async def scored(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """Return each token's log-probability given the tokens before it, at temperature 1; 0.0 for the first."""

        def read(choice: Any) -> list[float]:
            places = zip(choice["prompt_logprobs"][1:], token_ids[1:], strict=True)
            return [0.0, *(float(found[str(token)]["logprob"]) for found, token in places)]

        return await self._complete(model, [*token_ids], {"prompt_logprobs": 0}, read)

    async def adds_usage(self) -> bool:
        """Return whether streams always end with a usage chunk, as with vLLM's --enable-force-include-usage."""
        body = {"model": await self.base_model(), "prompt": PROBE_PROMPT, "max_tokens": 1, "stream": True}
        return _USAGE_CHUNK.search(await self._send("/v1/completions", body)) is not None

    async def rendered(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's tokens and sampling parameters, as vLLM with --enable-scale-out renders them."""

        def read(answer: Any) -> dict[str, Any]:
            rendered = answer[0] if isinstance(answer, list) else answer  # a completion's is a list of prompts
            return {**rendered, "sampling_params": {**rendered["sampling_params"]}}

        return await self._read(f"/v1/{endpoint}/render", read, {**body})

    async def _complete(self, model: str, prompt: Any, asked: dict[str, Any], read: Callable[[Any], T]) -> T:
        body = {"model": model, "prompt": prompt, "max_tokens": 1} | asked
        return await self._read("/v1/completions", lambda answer: read(answer["choices"][0]), body)

    async def _read(self, path: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """Return `read` applied to the JSON of an answer. Raises VllmError if that fails."""
        method = "GET" if body is None else "POST"
        text = await self._send(path, body, method)
        try:
            return read(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise VllmError(f"the answer to {method} {path} is not vLLM's: {text[:200]}") from None

    async def _send(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> str:
        """Return the text of an answer. Raises VllmError for an HTTP error, or one of `AWAY` if there is no answer."""
        base = self.base_url.rstrip("/")
        root, limit = base.removesuffix("/v1"), ClientTimeout(total=self.timeout_s, sock_connect=5)
        url = base + path.removeprefix("/v1") if path.startswith("/v1/") else root + path
        try:
            async with self.session.request(method, url, json=body, headers=self.headers, timeout=limit) as answer:
                text = (await answer.read()).decode(errors="replace")
        except TimeoutError as error:
            raise UpstreamTimeout(f"vLLM at {shown(root)} did not answer {method} {path} in time") from error
        except ClientError as error:
            raise UpstreamUnreachable(f"vLLM at {shown(root)} is not reachable: {why_it_failed(error)}") from None
        if answer.status >= 400:
            kind = VllmFault if answer.status >= 500 else VllmError
            raise kind(f"vLLM answered {method} {path} with HTTP {answer.status}: {text[:500]}")
        return text


Work = Callable[[VllmServer], Awaitable[T]]


class VllmFleet:
    """All vLLM servers of the policy."""

    def __init__(
        self, session: ClientSession, urls: Sequence[str], headers: Mapping[str, str] = {}, model: str | None = None
    ) -> None:
        """`urls`: the upstream's URLs; `headers` go with every request; `model` as in `VllmServer`."""
        self.servers = [VllmServer(session, url, headers, model) for url in urls]

    @classmethod
    def of(cls, config: Config, session: ClientSession) -> VllmFleet:
        """Return the policy's servers; there must be an upstream of kind vllm."""
        upstream = config.policy_upstream
        assert upstream is not None
        headers = upstream.credentials | operator_headers(config.policy.directory)
        return cls(session, upstream.published_to, headers, config.policy.model)

    async def each(
        self, work: Work[T], servers: Collection[VllmServer] | None = None
    ) -> dict[VllmServer, T | LightningError]:
        """Do the work on `servers`, by default all. Return each one's result or error; raise an error if all fail."""

        async def tried(server: VllmServer) -> T | LightningError:
            try:
                return await work(server)
            except LightningError as error:
                return error

        chosen = self.servers if servers is None else servers
        done = dict(zip(chosen, await asyncio.gather(*map(tried, chosen)), strict=True))
        errors = [outcome for outcome in done.values() if isinstance(outcome, LightningError)]
        if len(errors) == len(done):
            raise next((error for error in errors if not isinstance(error, AWAY)), errors[0])
        return done

    async def ask(self, work: Work[T], servers: Collection[VllmServer] | None = None) -> dict[VllmServer, T]:
        """Like `each`, but leave out servers that are down, and raise any other server's error."""
        answers: dict[VllmServer, T] = {}
        for server, outcome in (await self.each(work, servers)).items():
            if not isinstance(outcome, LightningError):
                answers[server] = outcome
            elif not isinstance(outcome, AWAY):
                raise outcome
        return answers

    async def first(self, work: Work[T]) -> T:
        return next(iter((await self.ask(work)).values()))

    async def rendered(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.first(lambda server: server.rendered(endpoint, body))

    async def reachable(self) -> list[VllmServer]:
        return [*await self.ask(VllmServer.models)]

    async def base_model(self) -> str:
        """Return the name under which all servers serve the base model. Raises VllmError if the names differ."""
        names = {*(await self.ask(VllmServer.base_model)).values()}
        if len(names) > 1:
            raise VllmError(f"the replicas serve different base models: {', '.join(sorted(names))}")
        return names.pop()

    async def weight_version(self) -> str:
        """Return the label of the weights being served; `mixed` if the servers' labels differ."""
        labels = {*(await self.ask(VllmServer.weight_version)).values()}
        return labels.pop() if len(labels) == 1 else "mixed"
