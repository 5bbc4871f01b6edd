"""Checks the policy's vLLM every second, and makes it serve the live version again after an outage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from ...core.config.address import without_addresses
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import LightningError, StoreUnavailable, UpstreamTimeout, UpstreamUnreachable
from ...core.records import PolicyVersion
from ...serving.health import Health
from ...serving.mode import ModeInUse
from ...serving.swap import NotServed, Pins, Swap
from ...serving.vllm import VllmError, VllmFault

log = logging.getLogger(__name__)

WATCH_S = 1.0
MENDED_S = 3.0  # that a look waits for servers that are being mended


Wanted = tuple[int, Mapping[str, int]]  # the live version, and by URL those of servers that are to have another


class Watch:
    """Knows whether vLLM serves the live version. Servers that do not are reported and get no calls."""

    def __init__(self, swap: Swap, upstream: UpstreamConfig, pins: Pins, health: Health, mode: ModeInUse) -> None:
        self.swap = swap
        self.upstream = upstream
        self.base: str | None = None  # the name under which vLLM serves the base model
        self.adds_usage: dict[str, bool] = {}  # by URL, whether streams have a usage chunk that nobody asked for
        self._pins = pins
        self._health = health
        self._mode = mode
        self._look: asyncio.Task[None] | None = None
        self._mending: asyncio.Task[None] | None = None
        self._in_line = False  # it serves what the store says is live
        # The version that was live at the last check of vLLM, and by URL the placed ones.
        self._in_line_for: Wanted = (0, {})
        self._problem: LightningError | None = None

    async def run(self) -> None:
        """Check vLLM every second until cancelled."""
        try:
            while True:
                await self._get_in_line()
                await asyncio.sleep(WATCH_S)
        finally:  # or what is under way would find its session closed
            for task in filter(None, (self._look, self._mending)):
                task.cancel()

    async def reachable(self) -> bool:
        """Return whether any of the servers answers, whatever it says."""
        try:
            await self.swap.vllm.models()
        except VllmFault:
            return False
        except VllmError:
            return True
        except LightningError:
            return False
        return True

    async def require(self) -> None:
        """Return when a call may go out. If vLLM is unreachable, return too: the call itself will fail.

        Raises NotServed, and UpstreamTimeout if vLLM does not say within the upstream's `connect_timeout_s`.
        """
        if not self._in_line:
            await self._get_in_line(self.upstream.connect_timeout_s)
        elif len(self.upstream.published_to) > 1:
            await self._see_who_missed_the_live_version()
        if isinstance(self._problem, NotServed):
            raise self._problem

    def is_in_line_for(self, live: PolicyVersion, placed: Mapping[str, PolicyVersion]) -> bool:
        """Return whether these were live and placed when the servers were looked at last."""
        return self._in_line_for == _wanted(live, placed)

    def up(self, urls: Iterable[str]) -> tuple[str, ...]:
        """Return those of the upstream's servers that have no problem, as far as was seen."""
        return tuple(url for url in urls if not self._health.problems.get((self.upstream.name, url)))

    async def _see_who_missed_the_live_version(self) -> None:
        """Take servers without it out of rotation, before a call that needs it is sent."""
        for _ in range(2):  # a look that was under way may have begun before
            if self._in_line_for != await self._wanted():
                await self._get_in_line(self.upstream.connect_timeout_s)

    async def _wanted(self) -> Wanted:
        placed = {} if self.swap.placed is None else await self.swap.placed()
        return _wanted(await self.swap.store.versions.live_now(), placed)

    async def _get_in_line(self, timeout: float | None = None) -> None:
        """Look, or wait for a look that is under way; UpstreamTimeout if it takes longer than `timeout` s."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_at_vllm())
        _, pending = await asyncio.wait((self._look,), timeout=timeout)
        if pending:
            raise UpstreamTimeout(f"the policy's server does not answer within {timeout} s")

    async def _look_at_vllm(self) -> None:
        problems: dict[str, LightningError | None] = {}
        try:
            wanted = await self._wanted()
            self.swap.mode = await self._mode.look()
            self.base = await self.swap.vllm.base_model()
            problems = await self._problems()
            self._in_line, self._in_line_for, self._problem = True, wanted, None
        except StoreUnavailable:  # it says nothing of vLLM; calls read the store, too, and get this error
            return
        except (UpstreamUnreachable, UpstreamTimeout) as error:
            self._fall_out_of_line(error, f"the policy is not served yet: {error}")
        except NotServed as error:
            self._fall_out_of_line(error, str(error))
        except LightningError as error:
            self._fall_out_of_line(NotServed(f"{error}: `lightning-proxy doctor` says what to do"), str(error))
        except Exception as error:  # the next look may find it mended
            unknown = NotServed(f"vLLM does not serve the live policy version: {error}")
            self._fall_out_of_line(unknown, "the live policy version cannot be served", exc_info=error)
        for url in dict.fromkeys((*self.upstream.urls, *self.upstream.published_to)):
            problem = problems.get(url, self._problem)
            self._health.report(self.upstream.name, url, None if problem is None else str(problem))

    async def _problems(self) -> dict[str, LightningError | None]:
        """Why servers do not serve what is live, by URL, after they were given it.

        Where one of several has the live merged weights, calls do not wait for the others, which may take minutes.
        """
        if self.swap.mode != "merged" or len(self.swap.vllm.servers) < 2:
            return await self.swap.restore(await self._pins.in_use())
        try:
            problems = await self.swap.out_of_line()
        except LightningError:  # none has them; mending waits for a trainer that publishes, which may take minutes
            await asyncio.wait((self._mend(),), timeout=MENDED_S)
            return await self.swap.out_of_line()
        if any(isinstance(problem, NotServed) for problem in problems.values()):
            self._mend()
        return problems

    def _mend(self) -> asyncio.Task[None]:
        """Give the live weights to servers that do not have them, beside the calls."""
        if self._mending is None or self._mending.done():
            self._mending = asyncio.create_task(self._restore())
        return self._mending

    async def _restore(self) -> None:
        try:
            await self.swap.restore(set())
        except LightningError as error:
            log.warning("servers without the live weights are not repaired: %s", error)

    def _fall_out_of_line(self, problem: LightningError, story: str, exc_info: Exception | None = None) -> None:
        """Log a problem once, not at every check while it stays the same: vLLM may be away for days."""
        if str(problem) != str(self._problem):
            log.warning("%s", story, exc_info=exc_info)
        problem.message = without_addresses(problem.message)  # which agents are shown
        self._in_line, self._problem = False, problem


def _wanted(live: PolicyVersion, placed: Mapping[str, PolicyVersion]) -> Wanted:
    return live.version, {url: version.version for url, version in placed.items()}
