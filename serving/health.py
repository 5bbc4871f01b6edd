"""Tracks the servers that are up, by health checks and the policy's watch."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from ..core.config.address import shown
from ..core.config.root import Config
from ..core.config.upstreams import UpstreamConfig, below
from ..core.http import through

log = logging.getLogger(__name__)

RECENT_S = 1.0
ONCE = {"once": True}  # every worker sees it, and one of them logs it

Server = tuple[str, str]  # the upstream's name, and one of its URLs


class Health:
    """Remembers the state of the servers that are watched; all others count as up."""

    def __init__(self) -> None:
        self.problems: dict[Server, str | None] = {}  # of watched servers

    def report(self, upstream: str, url: str, problem: str | None) -> None:
        server = (upstream, url)
        if problem is not None and self.problems.get(server) is None:
            log.warning("upstream %s, %s is down: %s", upstream, replica_name(url), problem, extra=ONCE)
        elif problem is None and self.problems.get(server) is not None:
            log.warning("upstream %s, %s is up again", upstream, replica_name(url), extra=ONCE)
        self.problems[server] = problem

    def is_down(self, upstream: UpstreamConfig) -> bool:
        """Return whether none of an upstream's servers is up."""
        return bool(upstream.urls) and all(self.problems.get((upstream.name, url)) for url in upstream.urls)


class Reach:
    """Asks upstreams whether they answer, each at most once a second, however often it is asked itself."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._looks: dict[str, tuple[float, asyncio.Future[list[str | None]]]] = {}

    async def problem(self, upstream: UpstreamConfig) -> str | None:
        """Return why none of the upstream's servers answers; None if one does, or if it has no address of its own."""
        begun = self._looks.get(upstream.name)
        if begun is None or time.monotonic() >= begun[0] + RECENT_S:
            urls = upstream.urls or [url for url in [upstream.litellm_params.get("api_base")] if isinstance(url, str)]
            look = asyncio.gather(*(_problem(upstream, url, self._session) for url in urls))
            self._looks[upstream.name] = begun = time.monotonic(), look
        problems = await asyncio.shield(begun[1])
        return None if None in problems or not problems else problems[0]


def replica_name(url: str) -> str:
    """Return the URL's host, port and path, without any part that may be secret."""
    return shown(url).partition("://")[2].removesuffix("/v1")


async def check_health(config: Config, session: aiohttp.ClientSession, health: Health) -> None:
    """Ask servers of upstreams with `health_check_s` for their models, again and again until cancelled.

    Not the policy's: `proxy/gateway/routing.py` knows more of it, whether a server has the live weights for one.
    """

    async def watch(upstream: UpstreamConfig, url: str, every_s: float) -> None:
        while True:
            health.report(upstream.name, url, await _problem(upstream, url, session))
            await asyncio.sleep(every_s)

    others = [upstream for upstream in config.upstreams if upstream is not config.policy_upstream]
    checked = [(upstream, upstream.health_check_s) for upstream in others if upstream.health_check_s]
    await asyncio.gather(*(watch(upstream, url, every_s) for upstream, every_s in checked for url in upstream.urls))


async def _problem(upstream: UpstreamConfig, url: str, session: aiohttp.ClientSession) -> str | None:
    """What is wrong with the server. Any answer but HTTP 5xx is fine: it may want a key, or list no models."""
    limit = aiohttp.ClientTimeout(total=upstream.connect_timeout_s)
    try:
        way = through(upstream, url)
        get = session.get(
            below(url, "/models"), headers=upstream.credentials, timeout=limit, allow_redirects=False, **way
        )
        async with get as answer:
            return f"it answers HTTP {answer.status}" if answer.status >= 500 else None
    except TimeoutError:
        return f"no answer within {upstream.connect_timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"not reachable ({type(error).__name__})"
