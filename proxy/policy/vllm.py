"""vLLM's operator routes: adapters, weights, pauses. Never reachable through the proxy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from ..errors import LightningError, UpstreamTimeout, UpstreamUnreachable
from ..upstreams.http import why_not_connected


class VllmError(LightningError):
    """vLLM refused an operator's request."""

    status = 502
    type = "upstream_error"


class VllmFault(VllmError):
    """vLLM met an error of its own (5xx). It may be on its way down, and still list what it served."""


def operator_session() -> aiohttp.ClientSession:
    """For `Vllm`. vLLM's server closes idle connections after 5 s; a request must not meet one that is just closing."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=4))


class Vllm:
    """One vLLM server, addressed by the `base_url` (ending in /v1) of its upstream."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 120.0,
    ) -> None:
        self.base_url = base_url
        self._headers = dict(headers or {})
        self._session = session
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)

    async def each(self, work: Callable[[Vllm], Awaitable[object]]) -> dict[str, LightningError | None]:
        """Do it here; by URL, what went wrong. See `VllmFleet`."""
        await work(self)
        return {self.base_url: None}

    async def reachable(self) -> list[Vllm]:
        """This server, whether it answers or not; of a fleet, those that do."""
        return [self]

    async def models(self) -> list[dict[str, Any]]:
        """The served models: the base model, whose `parent` is None, and the adapters."""
        answer = await self._request("GET", "/v1/models")
        return list(answer["data"])

    async def base_model(self) -> str:
        """The name under which the base model is served."""
        names = [m["id"] for m in await self.models() if m.get("parent") is None]
        if not names:
            raise VllmError(f"{self._root}/v1/models lists no base model")
        return str(names[0])

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter at `path` as model `name`; harmless when it is served already."""
        if name not in {m["id"] for m in await self.models()}:
            await self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        if name in {m["id"] for m in await self.models()}:
            await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def weight_version(self) -> str:
        """The label of the weights being served; `default` after a start."""
        return str((await self._request("GET", "/weight_info"))["weight_version"])

    async def is_paused(self) -> bool:
        return bool((await self._request("GET", "/is_paused"))["is_paused"])

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def replace_weights(self, path: str, label: str, committed: Callable[[], Awaitable[None]]) -> None:
        """Freeze running requests, load the weights at `path`, await `committed`, and let the requests go on.

        Their attention caches are kept; cached prefixes of finished requests are forgotten. Where this fails, requests
        stay frozen under the label `loading`: no token is sampled from unknown weights. `Swap.restore` mends it.
        """
        await self.load_weights(path)
        await committed()
        await self.go_on(label)

    async def load_weights(self, path: str) -> None:
        """The first half of `replace_weights`: frozen, and the new weights are there."""
        await self._request("POST", "/pause?mode=keep")
        await self._request("POST", "/update_weight_version", {"new_version": "loading"})
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._request("POST", "/collective_rpc", body)
        await self._request("POST", "/reset_prefix_cache")

    async def go_on(self, label: str) -> None:
        """The second half: name the weights, and let the requests go on."""
        await self._request("POST", "/update_weight_version", {"new_version": label})
        await self.resume()

    async def sample(self, model: str, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Sample an answer of up to `tokens` tokens at temperature 1; its ids, and their log-probabilities."""
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "logprobs": 0, "return_token_ids": True}
        answer = await self._request("POST", "/v1/completions", body | plain)
        choice = answer["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = self._root + path
        try:
            asked = self._session.request(method, url, json=body, headers=self._headers, timeout=self._timeout)
            async with asked as answer:
                text = await answer.text()
                if answer.status >= 400:
                    kind = VllmFault if answer.status >= 500 else VllmError
                    raise kind(f"vLLM answered {answer.status} to {method} {path}: {text[:500]}")
                return await answer.json() if "json" in answer.content_type else text
        except TimeoutError as error:
            raise UpstreamTimeout(f"vLLM at {self._root} did not answer {method} {path} in time") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamUnreachable(f"vLLM at {self._root} is not reachable: {why_not_connected(error)}") from error
        except aiohttp.ClientError as error:
            raise UpstreamUnreachable(f"vLLM at {self._root} is not reachable: {error}") from error
