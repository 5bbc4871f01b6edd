"""Several vLLM servers of one model, published to together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from ..errors import LightningError, UpstreamTimeout, UpstreamUnreachable
from .vllm import Vllm, VllmError

log = logging.getLogger(__name__)
T = TypeVar("T")


def open_vllm(
    session: aiohttp.ClientSession, urls: Sequence[str], headers: Mapping[str, str] | None = None
) -> Vllm | VllmFleet:
    """The server at the only URL, or a fleet of those at several; `headers` go with every request."""
    servers = [Vllm(session, url, headers) for url in urls]
    return servers[0] if len(servers) == 1 else VllmFleet(servers)


class VllmFleet:
    """Has the methods of `Vllm`, for all servers at once.

    A server that is away is left out: it serves nobody until `Swap.restore` has put it in line. What any other refuses
    is an error of the whole.
    """

    def __init__(self, servers: Sequence[Vllm]) -> None:
        self._servers = servers

    async def each(self, work: Callable[[Vllm], Awaitable[object]]) -> dict[str, LightningError | None]:
        """Do it at every server; by URL, what went wrong there. Raises if it went wrong everywhere."""
        outcomes = await asyncio.gather(*(work(server) for server in self._servers), return_exceptions=True)
        problems: dict[str, LightningError | None] = {}
        for server, outcome in zip(self._servers, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, LightningError):
                raise outcome
            problems[server.base_url] = outcome if isinstance(outcome, LightningError) else None
        found = [problem for problem in problems.values() if problem is not None]
        if len(found) == len(problems):
            raise next((problem for problem in found if not _is_away(problem)), found[0])
        return problems

    async def reachable(self) -> list[Vllm]:
        """The servers that answer. Raises as `models` does if there is none."""
        return [server for server, _ in await self._ask(Vllm.models)]

    async def models(self) -> list[dict[str, Any]]:
        """The models of the first server that answers."""
        return (await self._ask(Vllm.models))[0][1]

    async def base_model(self) -> str:
        names = {name for _, name in await self._ask(Vllm.base_model)}
        if len(names) > 1:
            raise VllmError(f"the replicas serve different base models: {', '.join(sorted(names))}")
        return names.pop()

    async def load_adapter(self, name: str, path: str) -> None:
        await self._ask(lambda server: server.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        await self._ask(lambda server: server.unload_adapter(name))

    async def weight_version(self) -> str:
        """The label of the weights being served; `mixed` if the servers have different ones."""
        labels = {label for _, label in await self._ask(Vllm.weight_version)}
        return labels.pop() if len(labels) == 1 else "mixed"

    async def replace_weights(self, path: str, label: str, committed: Callable[[], Awaitable[None]]) -> None:
        """As of one server: all are frozen until all have the weights, so that no two versions are sampled at once."""
        loaded = VllmFleet([server for server, _ in await self._ask(lambda server: server.load_weights(path))])
        await committed()
        await loaded._ask(lambda server: server.go_on(label))

    async def _ask(self, work: Callable[[Vllm], Awaitable[T]]) -> list[tuple[Vllm, T]]:
        """Every server's answer, without those that are away. Raises what one refused, or if all are away."""
        outcomes = await asyncio.gather(*(work(server) for server in self._servers), return_exceptions=True)
        answers: list[tuple[Vllm, T]] = []
        away: list[BaseException] = []
        for server, outcome in zip(self._servers, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                answers.append((server, outcome))
            elif _is_away(outcome):
                away.append(outcome)
            else:
                raise outcome
        if not answers:
            raise away[0]
        return answers


def _is_away(error: BaseException) -> bool:
    return isinstance(error, UpstreamUnreachable | UpstreamTimeout)
