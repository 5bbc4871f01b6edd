"""Tracks which servers are up, by health checks and the policy's watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from ..core.config.address import shown
from ..core.config.root import Config
from ..core.config.upstreams import UpstreamConfig, below
from ..core.http import through

log = logging.getLogger(__name__)

RECENT_S = 1.0
ONCE = {"once": True}  # every worker sees it, and one of them logs it


class Health:
    """Remembers the state of watched servers. All others count as up."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.problems: dict[tuple[str, str], str | None] = {}  # by the upstream's name and one of its URLs
        self._session = session
        self._asked: dict[str, asyncio.Future[list[str | None]]] = {}

    def report(self, upstream: str, url: str, problem: str | None) -> None:
        before = self.problems.get((upstream, url))
        if (problem is None) != (before is None):
            now = "up again" if problem is None else f"down: {problem}"
            log.warning("server %s of upstream %s is %s", replica_name(url), upstream, now, extra=ONCE)
        self.problems[upstream, url] = problem

    def up(self, upstream: UpstreamConfig, urls: Sequence[str] = ()) -> list[str]:
        """Return those of `urls` (by default, all of the upstream's) that have no known problem."""
        return [url for url in urls or upstream.urls if not self.problems.get((upstream.name, url))]

    def is_down(self, upstream: UpstreamConfig) -> bool:
        return bool(upstream.urls) and not self.up(upstream)

    async def ask(self, upstream: UpstreamConfig) -> str | None:
        """Return the first server's problem if all have one, else None. Asks an upstream at most once a second."""
        if upstream.name not in self._asked:
            urls = upstream.urls or [url for url in [upstream.litellm_params.get("api_base")] if isinstance(url, str)]
            self._asked[upstream.name] = asyncio.gather(*(self._problem(upstream, url) for url in urls))
            asyncio.get_running_loop().call_later(RECENT_S, self._asked.pop, upstream.name)
        problems = await asyncio.shield(self._asked[upstream.name])
        return None if None in problems else next(iter(problems), None)

    async def watch(self, config: Config) -> None:
        """Keep checking the servers of upstreams with `health_check_s`. `Watch` checks those of the policy instead."""

        async def watch(upstream: UpstreamConfig, url: str, every_s: float) -> None:
            while True:
                self.report(upstream.name, url, await self._problem(upstream, url))
                await asyncio.sleep(every_s)

        others = [upstream for upstream in config.upstreams if upstream is not config.policy_upstream]
        checked = [(u, url, u.health_check_s) for u in others for url in u.urls if u.health_check_s]
        await asyncio.gather(*(watch(*one) for one in checked))

    async def _problem(self, upstream: UpstreamConfig, url: str) -> str | None:
        """Return the server's problem, or None. Every answer below HTTP 500 is fine: the server may need a key."""
        limit, way = aiohttp.ClientTimeout(total=upstream.connect_timeout_s), through(upstream, url)
        try:
            async with self._session.get(
                below(url, "/models"), headers=upstream.credentials, timeout=limit, allow_redirects=False, **way
            ) as answer:
                return f"it answers with HTTP {answer.status}" if answer.status >= 500 else None
        except TimeoutError:
            return f"no answer within {upstream.connect_timeout_s:g} s"
        except (aiohttp.ClientError, OSError):
            return "not reachable"


def replica_name(url: str) -> str:
    """Return the URL's host, port and path, without a final `/v1` or parts that may be secret."""
    return shown(url).partition("://")[2].removesuffix("/v1")
