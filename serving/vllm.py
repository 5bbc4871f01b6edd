"""vLLM's operator routes: adapters, weights, pauses. None of them can be reached through the proxy."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from ..core.config.address import shown
from ..core.config.root import Config
from ..core.errors import LightningError, UpstreamTimeout, UpstreamUnreachable
from ..core.http import why_it_failed
from .operator import operator_headers
from .vllm_worker import RELOAD

LOADING = "loading"  # the label of the weights while they are replaced
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)", re.MULTILINE)
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
PROBE_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]  # tokens that every vocabulary has

T = TypeVar("T")


class VllmError(LightningError):
    """vLLM refused an operator's request."""

    status = 502
    type = "upstream_error"


class VllmFault(VllmError):
    """vLLM had an internal error (5xx). It may be shutting down, yet still list its old models."""


def operator_session() -> aiohttp.ClientSession:
    """Return a session for the classes below. It closes idle connections before vLLM does after 5 s."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=4))


class VllmServer:
    """One vLLM server, addressed by the `base_url` of its upstream; operator routes are beside its /v1."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        headers: Mapping[str, str],
        model: str | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """`model`: the base model, where a server lists several; by default its first. `timeout_s`: of a request."""
        self.base_url = base_url.rstrip("/")
        self._model = model
        self._headers = headers
        self._session = session
        self._root = self.base_url.removesuffix("/v1")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)

    async def models(self) -> list[dict[str, Any]]:
        """Return the served models: the base model, whose `parent` is None, and the adapters."""
        return await self._request("GET", "/v1/models", read=lambda answer: [_model(model) for model in answer["data"]])

    async def base_model(self) -> str:
        """Return the name under which the base model is served: the configured one, if the server does not say."""
        try:
            names = [model["id"] for model in await self.models() if model.get("parent") is None]
        except VllmError as error:
            if self._model is None or isinstance(error, VllmFault):
                raise
            return self._model
        if not names:
            raise VllmError(f"{shown(self._root)}/v1/models lists no base model")
        return str(self._model if self._model in names else names[0])

    async def adapters(self) -> dict[str, str | None]:
        """Return the paths that models were loaded from, by name; None where the server does not say."""
        return {model["id"]: model.get("root") for model in await self.models()}

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter at `path` as model `name`, whatever has this name; harmless when it is served."""
        if (root := (await self.adapters()).get(name, "")) not in (path, None):
            body = {"lora_name": name, "lora_path": path} | ({"load_inplace": True} if root else {})
            await self._request("POST", "/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Stop serving the adapter; harmless when it is not served."""
        if name in await self.adapters():
            await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def weight_version(self) -> str:
        """Return the label of the weights being served; `default` after a start."""
        return await self._request("GET", "/weight_info", read=lambda answer: str(answer["weight_version"]))

    async def is_paused(self) -> bool:
        return await self._request("GET", "/is_paused", read=lambda answer: bool(answer["is_paused"]))

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def load_weights(self, path: str) -> None:
        """Freeze running requests and load the weights at `path`, under the label `loading`.

        Attention caches of running requests are kept; cached prefixes of finished requests are forgotten.
        """
        await self._request("POST", "/pause?mode=keep")
        await self.name_weights(LOADING)
        await self._reload(path)
        await self._request("POST", "/reset_prefix_cache")

    async def _reload(self, path: str) -> None:
        """Ask for our own method; a vLLM that somebody else has started may have only its own."""
        where = {"kwargs": {"weights_path": path}}
        try:
            await self._request("POST", "/collective_rpc", {"method": RELOAD, **where})
        except VllmFault:
            await self._request("POST", "/collective_rpc", {"method": "reload_weights", **where})

    async def go_on(self, label: str) -> None:
        """Name the weights that were loaded, and resume the frozen requests."""
        await self.name_weights(label)
        await self.resume()

    async def name_weights(self, label: str) -> None:
        await self._request("POST", "/update_weight_version", {"new_version": label})

    async def requests(self) -> int:
        """Return how many requests it has under way or waiting; 0 if it does not say."""
        try:
            return await self._request("GET", "/metrics", read=_requests, parse=str)
        except VllmFault:
            raise
        except VllmError:
            return 0

    async def sample(self, model: str, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Sample up to `tokens` tokens at temperature 1; return their ids and their log-probabilities."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "logprobs": 0, "return_token_ids": True}
        return await self._request("POST", "/v1/completions", body | _PLAIN, _sampled)

    async def probe(self, model: str) -> list[tuple[str, dict[str, float]]]:
        """Sample with a fixed seed from a fixed prompt: by position, the token and the most likely ones.

        Token ids as text, with log-probabilities.
        """
        body: dict[str, Any] = {"model": model, "prompt": PROBE_PROMPT, "max_tokens": 16, "ignore_eos": True, "seed": 0}
        body |= {"logprobs": 5, "return_tokens_as_token_ids": True} | _PLAIN
        return await self._request("POST", "/v1/completions", body, _most_likely)

    async def tokens(self, model: str, text: str) -> list[int]:
        """Return the tokens of a text, with only those special tokens that it names."""
        body = {"model": model, "prompt": text, "max_tokens": 1, "add_special_tokens": False, "return_token_ids": True}
        return await self._request(
            "POST", "/v1/completions", body, lambda answer: [*map(int, answer["choices"][0]["prompt_token_ids"])]
        )

    async def encoded(self, text: str) -> list[int]:
        """Return the tokens of a text, without any that its tokenizer adds. It is not computed with."""
        body = {"prompt": text, "add_special_tokens": False}
        return await self._request("POST", "/tokenize", body, lambda answer: [*map(int, answer["tokens"])])

    async def decoded(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return await self._request(
            "POST", "/detokenize", {"tokens": [*token_ids]}, lambda answer: str(answer["prompt"])
        )

    async def scored(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """Return each token's log-probability after those before it, at temperature 1; 0.0 for the first.

        vLLM 0.32 on a CPU with LoRA enabled ends when it is asked for this.
        """
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}
        return await self._request("POST", "/v1/completions", body, lambda answer: _scored(answer, token_ids))

    async def adds_usage(self) -> bool:
        """Return whether streams end with a usage chunk unasked, as those of vLLM's --enable-force-include-usage do."""
        body = {"model": await self.base_model(), "prompt": PROBE_PROMPT, "max_tokens": 1, "stream": True}
        return await self._request("POST", "/v1/completions", body, _has_usage, _events)

    async def rendered(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens and sampling parameters that vLLM makes of a request to `endpoint`.

        VllmError where vLLM refuses it, or has no such route: it needs --enable-scale-out.
        """
        answer = await self._request("POST", f"/v1/{endpoint}/render", dict(body), lambda found: found)
        # A completion's route renders a list of prompts.
        answer = answer[0] if isinstance(answer, list) and answer else answer
        if not isinstance(answer, dict) or not isinstance(answer.get("sampling_params"), dict):
            raise VllmError(f"vLLM does not say how it samples: /v1/{endpoint}/render")
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        read: Callable[[Any], T] | None = None,
        parse: Callable[[str], Any] = json.loads,
    ) -> T:
        """Return `read` of the answer; VllmError where it fails. None without `read`."""
        url = self.base_url + path.removeprefix("/v1") if path.startswith("/v1/") else self._root + path
        try:
            request = self._session.request(method, url, json=body, headers=self._headers, timeout=self._timeout)
            async with request as answer:
                text = (await answer.read()).decode(errors="replace")
        except TimeoutError as error:
            raise UpstreamTimeout(f"vLLM at {shown(self._root)} did not answer {method} {path} in time") from error
        except aiohttp.ClientError as error:
            why = why_it_failed(error)
            raise UpstreamUnreachable(f"vLLM at {shown(self._root)} is not reachable: {why}") from None
        if answer.status >= 400:
            kind = VllmFault if answer.status >= 500 else VllmError
            raise kind(f"vLLM answered {answer.status} to {method} {path}: {text[:500]}")
        try:
            return read(parse(text)) if read else None  # type: ignore[return-value]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise VllmError(f"the answer to {method} {path} is not vLLM's: {text[:200]}") from None


def _model(model: Any) -> dict[str, Any]:
    if not isinstance(model["id"], str):
        raise TypeError
    return dict(model)


def _sampled(answer: Any) -> tuple[list[int], list[float]]:
    choice = answer["choices"][0]
    return list(map(int, choice["token_ids"])), list(map(float, choice["logprobs"]["token_logprobs"]))


def _scored(answer: Any, token_ids: Sequence[int]) -> list[float]:
    _, *found = answer["choices"][0]["prompt_logprobs"]
    logprobs = [float(one[str(token)]["logprob"]) for one, token in zip(found, token_ids[1:], strict=True)]
    return [0.0, *logprobs]


def _most_likely(answer: Any) -> list[tuple[str, dict[str, float]]]:
    logprobs = answer["choices"][0]["logprobs"]
    top = [{str(token): float(value) for token, value in found.items()} for found in logprobs["top_logprobs"]]
    return list(zip(map(str, logprobs["tokens"]), top, strict=True))


def _events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def _has_usage(events: list[Any]) -> bool:
    return any(event.get("choices") == [] and event.get("usage") for event in events)


def _requests(text: str) -> int:
    return sum(int(float(count)) for count in _REQUESTS.findall(text))


class VllmFleet:
    """All vLLM servers of the policy, one or more, which are published to together.

    A server that is away is left out: it answers no calls until `Swap.restore` has given it the live version. If any
    other server refuses, the fleet has refused.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> None:
        """`urls`: those of the upstream; `headers` go with every request; `model` is that of `VllmServer`."""
        self._servers = [VllmServer(session, url, headers or {}, model) for url in urls]

    @classmethod
    def of(cls, config: Config, session: aiohttp.ClientSession) -> VllmFleet:
        """Return the policy's servers; there must be an upstream of kind vllm."""
        upstream = config.policy_upstream
        assert upstream is not None
        headers = upstream.credentials | operator_headers(config.policy.directory)
        return cls(session, upstream.published_to, headers, config.policy.model)

    @property
    def servers(self) -> Sequence[VllmServer]:
        """Return all servers, also those that are away."""
        return self._servers

    async def each(self, work: Callable[[VllmServer], Awaitable[object]]) -> dict[str, LightningError | None]:
        """Do the work at every server and return the errors by URL. Raise if it failed everywhere."""
        problems: dict[str, LightningError | None] = {}
        for server, outcome in await self._outcomes(work):
            if isinstance(outcome, BaseException) and not isinstance(outcome, LightningError):
                raise outcome
            problems[server.base_url] = outcome if isinstance(outcome, LightningError) else None
        errors = [problem for problem in problems.values() if problem is not None]
        if len(errors) == len(problems):
            raise next((error for error in errors if not _is_away(error)), errors[0])
        return problems

    async def reachable(self) -> list[VllmServer]:
        """Return the servers that answer, or the only server in any case. Raise like `models` if none answers."""
        if len(self._servers) == 1:
            return [*self._servers]
        return [server for server, _ in await self._ask(VllmServer.models)]

    async def models(self) -> list[dict[str, Any]]:
        """Return the models of the first server that answers."""
        return (await self._ask(VllmServer.models))[0][1]

    async def base_model(self) -> str:
        """Return the name under which all servers serve the base model; VllmError if they serve different ones."""
        names = {name for _, name in await self._ask(VllmServer.base_model)}
        if len(names) > 1:
            raise VllmError(f"the replicas serve different base models: {', '.join(sorted(names))}")
        return names.pop()

    async def rendered(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return `VllmServer.rendered` of the first server that answers."""
        return (await self._ask(lambda server: server.rendered(endpoint, body)))[0][1]

    async def load_adapter(self, name: str, path: str) -> None:
        await self._ask(lambda server: server.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        await self._ask(lambda server: server.unload_adapter(name))

    async def weight_version(self) -> str:
        """Return the label of the weights being served; `mixed` if the servers have different ones."""
        labels = {label for _, label in await self._ask(VllmServer.weight_version)}
        return labels.pop() if len(labels) == 1 else "mixed"

    async def replace_weights(self, path: str, label: str, commit: Callable[[], Awaitable[None]]) -> None:
        """Freeze all servers, load the weights at `path`, await `commit`, and resume the requests.

        No two versions are sampled at once. Where this fails, requests stay frozen under the label `loading`, so that
        no token is sampled from unknown weights; `Swap.restore` repairs it.
        """
        loaded = await self._ask(lambda server: server.load_weights(path))
        await commit()
        await self._ask(lambda server: server.go_on(label), [server for server, _ in loaded])

    async def _ask(
        self, work: Callable[[VllmServer], Awaitable[T]], servers: Sequence[VllmServer] | None = None
    ) -> list[tuple[VllmServer, T]]:
        """Every server's answer, without those that are away. Raises what one refused, or if all are away."""
        answers: list[tuple[VllmServer, T]] = []
        away: list[BaseException] = []
        for server, outcome in await self._outcomes(work, servers):
            if not isinstance(outcome, BaseException):
                answers.append((server, outcome))
            elif _is_away(outcome):
                away.append(outcome)
            else:
                raise outcome
        if not answers:
            raise away[0]
        return answers

    async def _outcomes(
        self, work: Callable[[VllmServer], Awaitable[T]], servers: Sequence[VllmServer] | None = None
    ) -> list[tuple[VllmServer, T | BaseException]]:
        chosen = self._servers if servers is None else servers
        outcomes = await asyncio.gather(*(work(server) for server in chosen), return_exceptions=True)
        return list(zip(chosen, outcomes, strict=True))


def _is_away(error: BaseException) -> bool:
    return isinstance(error, UpstreamUnreachable | UpstreamTimeout)
