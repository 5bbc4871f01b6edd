"""Decides which upstream, model and policy version a call goes to, and checks that vLLM serves the live version.

A server's label for its weights proves nothing. So `Watch` also sends each server the same prompt with the same seed:
when it comes up, when another version goes live, and daily. This detects wrong weights, but not a version one step off.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from time import monotonic
from typing import Any

from ...core.config.address import without_addresses
from ...core.config.policy import PolicyConfig
from ...core.config.root import Config
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import Conflict, LightningError, NotFound, StoreUnavailable, UpstreamTimeout
from ...core.records import PolicyVersion, RolloutName
from ...serving.health import Health, replica_name
from ...serving.mode import other_mode
from ...serving.swap import NotServed, Problems, Swap, obstacle
from ...serving.vllm import AWAY, LOADING, VllmServer
from ...store.store import Store
from ...store.versions import PINNED_S
from .upstream import Route

log = logging.getLogger(__name__)

# Says which version answers a rollout, given the live one: another one where two versions are compared.
Choose = Callable[[RolloutName, PolicyVersion], Awaitable[PolicyVersion]]
# The live version, and by URL the versions of servers that should have another one.
Wanted = tuple[PolicyVersion, Mapping[str, PolicyVersion]]

WATCH_S = 1.0
MENDED_S = 3.0  # that a check waits for servers that are being repaired
PROBE_S = 86_400.0  # between two questions to one server
AGAIN_S = 120.0  # until a server is asked again that could not answer
LOOK_S = 1.0  # until a restart is noticed
TOLERANCE = 0.2  # mean difference of log-probabilities; bfloat16 alone makes up to 0.1


class PolicyRouter:
    """Routes each call by its rollout and the requested model."""

    def __init__(self, config: Config, store: Store, watch: Watch | None, choose: Choose | None = None) -> None:
        """`watch`: None without an upstream of kind vllm. Without `choose`, new rollouts get the live version."""
        self.alias, self._policy, self._first = config.policy.alias, config.policy, config.upstreams[0]
        self._upstreams = {upstream.name: upstream for upstream in config.upstreams}
        standing_by = {name for upstream in config.upstreams for name in upstream.fallbacks}
        self._named = {  # the first upstream that names a model; names that only a fallback maps are none
            model: upstream
            for upstream in reversed(config.upstreams)
            for model in (*upstream.models, *(() if upstream.name in standing_by else upstream.model_map))
        }
        self._store, self._watch, self._choose = store, watch, choose

    async def route(self, rollout: RolloutName, model: str | None, *, recorded: bool = False) -> Route:
        """Return where a call goes. Raises NotServed or UpstreamTimeout if the policy is not ready and has no fallback.

        The alias reaches the live version or, with adapters and `pin_rollouts`, the one that the rollout began with.
        A rollout may have been opened for another model (`opened_for`). While two versions are compared, `choose`
        decides for `recorded` calls that are not pinned.
        """
        opened_for, pin, watch = None, None, self._watch
        if model == self.alias:
            opened_for, pin = await self._store.rollouts.opened_for(rollout.rollout_id)
            model = opened_for or model
        upstream, by_alias = self._upstream_of(model), model == self.alias
        fallbacks = tuple(self._fallbacks(upstream, model, opened_for)) if upstream.fallbacks else ()
        if watch is None or upstream is not watch.upstream:
            renamed = self._policy.model or opened_for if by_alias else opened_for
            return Route(upstream, upstream.model_map.get(model or "", renamed), None, fallbacks)
        try:
            live, placed = await watch.current()
        except (NotServed, UpstreamTimeout) as error:
            if not fallbacks:
                raise
            log.warning("upstream %s: %s; the call goes to %s", upstream.name, error, fallbacks[0].upstream.name)
            return fallbacks[0]._replace(fallbacks=fallbacks[1:])
        merged, chosen, servers = watch.swap.mode == "merged", live, tuple[str, ...]()
        choose = self._choose if recorded and by_alias else None
        if merged and placed:  # only the servers that have the chosen weights answer; one that is up if any is
            versions = {url: placed.get(url, live) for url in upstream.urls}
            up = {versions[url].version: versions[url] for url in watch.health.up(upstream)}
            chosen = await choose(rollout, live) if choose is not None and len(up) > 1 else live
            chosen = next(one for one in (chosen, live, *up.values()) if one.version in up or not up)
            servers = tuple(url for url, version in versions.items() if version.version == chosen.version)
        elif by_alias and not merged:
            if pin is None or not self._policy.pin_rollouts:
                chosen = live if choose is None else await choose(rollout, live)
            elif pin != live.version:
                pinned = await self._store.versions.get(pin)
                if pin == 0 or (pinned.path and pinned.publish == "lora"):  # else its files were pruned
                    chosen = pinned
        version: int | None = chosen.version if merged or by_alias else 0
        served = opened_for
        if by_alias and (merged or version == 0):
            served = watch.base
        elif by_alias:
            served = chosen.adapters.get(self._policy.adapter_of(rollout.agent), chosen.served_model)
        elif model is not None and model != watch.base:
            version = None if merged else await self._store.versions.named(model)
        return Route(upstream, served, version, fallbacks, merged or by_alias, watch.adds_usage, servers)

    async def require(self, policy_version: int | None, model: str | None) -> None:
        """Load `policy_version`, if given. Raise NotFound or Conflict if no rollout can be opened for it or `model`."""
        if policy_version is not None and model is not None:
            raise Conflict("policy_version and model cannot be combined", param="model")
        if policy_version is not None:
            await self._require_version(policy_version)
        if model in (None, *self._named):
            return
        if self._watch is None or self._first.kind != "vllm":  # it gets every model that none names
            is_served = self._first.kind != "litellm"
        else:
            is_served = model == self.alias or model in await self._watch.swap.vllm.first(VllmServer.adapters)
        if not is_served:
            raise NotFound(f"no upstream serves the model {model!r}; add it to an upstream's `models`", param="model")

    async def _require_version(self, number: int) -> None:
        """Load a version in addition to the live one. Raises Conflict if that is impossible, NotFound if unknown."""
        version, live = await self._store.versions.get(number), await self._store.versions.live_now()
        if version.version == live.version:
            return None
        if self._watch is None:
            why = "no upstream is of kind vllm, so only the live policy version can be requested"
        elif self._watch.swap.mode == "merged":
            why = (
                f"policy version {number} is not served: with merged weights, only the live one can be served; "
                f"promote {number} first (`eval --promote` does so, and makes {live.version} live again when it ends)"
            )
        elif not self._policy.pin_rollouts:
            why = "with policy.pin_rollouts: false only the live version answers"
        elif (problem := obstacle(version, "lora")) is not None:
            why = f"policy version {number} cannot be served: {problem}"
        else:
            return await self._watch.swap.load(version)
        raise Conflict(why, param="policy_version")

    def alias_entry(self) -> dict[str, Any]:
        return {"id": self.alias, "object": "model", "created": int(time.time()), "owned_by": "lightning-proxy"}

    def of_alias(self) -> list[UpstreamConfig]:
        """Return the upstream that answers for the alias, and its fallbacks."""
        first = self._upstream_of(self.alias)
        return [first, *(route.upstream for route in self._fallbacks(first, self.alias))]

    def _upstream_of(self, model: str | None) -> UpstreamConfig:
        if model == self.alias and self._watch is not None:
            return self._watch.upstream
        return self._named.get(model or "", self._first)

    def _fallbacks(self, upstream: UpstreamConfig, model: str | None, renamed: str | None = None) -> Iterator[Route]:
        """The upstream's fallbacks and theirs, each once. Omits those of kind litellm that do not name the model."""
        left, seen = [*upstream.fallbacks], set[str]()
        while left:
            other = self._upstreams[left.pop(0)]
            left = [*other.fallbacks, *left]
            has_name = other.kind != "litellm" or model in other.models or model in other.model_map
            if has_name and other.name not in seen:
                seen.add(other.name)
                yield Route(other, other.model_map.get(model or "", renamed), None)


class Watch:
    """Checks whether vLLM serves the live version. Servers that do not are reported and repaired, and get no calls."""

    def __init__(self, config: PolicyConfig, swap: Swap, upstream: UpstreamConfig, health: Health) -> None:
        self.swap, self.upstream, self.health = swap, upstream, health
        self.base: str | None = None  # the name under which vLLM serves the base model
        self.adds_usage = False  # streams of a server have a usage chunk that nobody asked for
        self.other_mode: str | None = None  # another process publishes in another mode
        self._config = config
        self._look: asyncio.Task[None] | None = None
        self._mending: asyncio.Task[Problems] | None = None
        self._checked_for: Wanted | None = None  # at the last check of vLLM
        # None if vLLM serves what the store says is live.
        self._problem: LightningError | None = NotServed("the policy's server has not been checked yet")
        self._probed: dict[str, tuple[PolicyVersion, float]] = {}  # by URL; with the time of the next question

    async def run(self) -> None:
        try:
            while True:
                await self._check()
                await asyncio.sleep(WATCH_S)
        finally:  # before the session that they use is closed
            for task in filter(None, (self._look, self._mending)):
                task.cancel()

    async def ask_again(self) -> None:
        """Keep probing every server that is due, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for server in self.swap.vllm.servers:
                try:
                    await self._probe(server)
                except LightningError as error:  # it is away, has no such route, or the store is
                    log.debug("%s is not probed: %s", replica_name(server.base_url), error)

    async def current(self) -> Wanted:
        """Return the versions that vLLM should serve. Raises NotServed if it is found not to, or UpstreamTimeout."""
        if self._problem is not None:
            await self._check(self.upstream.connect_timeout_s)
        wanted = await self._wanted()
        if len(self.upstream.published_to) > 1:
            for _ in range(2):  # servers that missed a version get no call; a look may have begun before it was live
                if self._checked_for != wanted:
                    await self._check(self.upstream.connect_timeout_s)
                    wanted = await self._wanted()
        if isinstance(self._problem, NotServed):
            raise self._problem
        return wanted

    async def _wanted(self) -> Wanted:
        placed = {} if self.swap.placed is None else await self.swap.placed()
        return await self.swap.store.versions.live_now(), placed

    async def _check(self, timeout: float | None = None) -> None:
        """Check the servers, or wait for a running check. Raise UpstreamTimeout if it takes longer than `timeout` s."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_at_vllm())
        _, pending = await asyncio.wait((self._look,), timeout=timeout)
        if pending:
            raise UpstreamTimeout(f"the policy's server could not be checked within {timeout} s")

    async def _look_at_vllm(self) -> None:
        problems, swap = Problems(), self.swap
        try:
            wanted = await self._wanted()
            if self._config.publish == "auto":
                decided = await swap.store.versions.mode()
                swap.mode = wanted[0].publish or (decided.mode if decided else swap.mode)
            else:
                self.other_mode = await other_mode(swap.store, "proxy", swap.mode)
            self.base = await swap.vllm.base_model()
            problems = await self._problems()
            self._checked_for, self._problem = wanted, None
        except StoreUnavailable:  # it says nothing of vLLM; calls read the store, too, and get this error
            return
        except Exception as error:  # the next check may succeed
            known, problem = isinstance(error, LightningError), error
            if not isinstance(problem, (NotServed, *AWAY)):
                advice = f"{error}: `lightning-proxy doctor` says what to do"
                problem = NotServed(advice if known else f"vLLM does not serve the live policy version: {error}")
            if str(problem) != str(self._problem):  # vLLM may be away for days
                log.warning("the policy is not served: %s", problem, exc_info=None if known else error)
            problem.message = without_addresses(problem.message)  # which agents are shown
            self._problem = problem
        seen = {server.base_url: problem for server, problem in problems.items()}
        for url in dict.fromkeys((*self.upstream.urls, *self.upstream.published_to)):
            why = seen.get(url, self._problem)
            self.health.report(self.upstream.name, url, None if why is None else str(why))

    async def _problems(self) -> Problems:
        """Repair servers, and return their problems. Waits for the repairs only if no server has the live version."""
        pinned = await self.swap.store.versions.pinned(time.time() - PINNED_S)
        if len(self.swap.vllm.servers) == 1:  # while it gets new weights, its calls are paused, then continue
            return await self.swap.restore(pinned)
        try:
            problems = await self.swap.problems(pinned)
        except NotServed:  # repairs wait for a trainer that is publishing, perhaps for minutes
            done, _ = await asyncio.wait((self._mend(pinned),), timeout=MENDED_S)
            if not done and self.swap.mode == "merged":
                labels = await self.swap.vllm.each(VllmServer.weight_version)
                if {*labels.values()} == {LOADING}:  # all are getting weights: their calls are paused, then continue
                    return Problems()
            return await (done.pop() if done else self.swap.problems(pinned))
        if any(isinstance(problem, NotServed) for problem in problems.values()):
            self._mend(pinned)
        return problems

    def _mend(self, pinned: set[int]) -> asyncio.Task[Problems]:
        """Start repairs in the background, unless some are running, and return their task."""
        if self._mending is None or self._mending.done():
            self._mending = asyncio.create_task(self.swap.restore(pinned))
            self._mending.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._mending

    async def _probe(self, server: VllmServer) -> None:
        """Probe a server if it is due, and compare its answer with the live version's first answer, if there is one."""
        url, versions, merged = server.base_url, self.swap.store.versions, self.swap.mode == "merged"
        if self.health.problems.get((self.upstream.name, url), "not seen yet") is not None:
            self._probed.pop(url, None)
            return
        live = await versions.live_now()
        if url not in self._probed:
            self._probed[url] = live, 0.0
            self.adds_usage |= await server.adds_usage()
        version, due = self._probed[url]
        if version == live and monotonic() < due:
            return
        self._probed[url] = live, monotonic() + AGAIN_S
        if not merged and live.version == 0:
            return  # nothing can have replaced it: its operator routes load adapters only
        if merged and not await self.swap.has_label(server, live):
            return
        model = await server.base_model() if merged else str(live.served_model)
        answer = await server.probe(model)
        if await versions.live_now() != live or (merged and not await self.swap.has_label(server, live)):
            return  # other weights went live meanwhile
        self._probed[url] = live, monotonic() + PROBE_S
        first = await versions.probed(live.version)
        if first is None or first.model != model:
            await versions.keep_answer(live.version, model, answer)
            return
        problem, apart, allowed = None, difference(first.answer, answer), self._config.verify_tolerance or TOLERANCE
        if not apart <= allowed:  # NaN too
            mend = f"`policy promote {live.version}`" if merged else "a restart of vLLM"
            problem = (
                f"{self.upstream.server_name(url)} does not answer as policy version {live.version} did: its "
                f"log-probabilities differ by {apart:.3g} on average ({allowed:g} is allowed); {mend} loads "
                "the version again"
            )
        if problem != first.problem:
            level = logging.INFO if problem is None else logging.ERROR
            log.log(level, "%s", problem or f"{self.upstream.server_name(url)} serves the live version again")
        await versions.keep_problem(live.version, problem)


def difference(first: list[Any], again: list[Any]) -> float:
    """Return the mean absolute difference of two answers' log-probabilities, up to the first token that differs.

    It is infinite if, at one of these tokens, the answers share no candidate, and NaN if an answer is empty.
    """
    found: list[float] = []
    for (token, before), (other, now) in zip(first, again, strict=False):
        if not (both := before.keys() & now.keys()):
            return math.inf
        found += [abs(before[name] - now[name]) for name in both]
        if token != other:
            break
    return math.fsum(found) / len(found) if found else math.nan
