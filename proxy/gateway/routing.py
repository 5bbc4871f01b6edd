"""Decides the upstream, model and policy version that a call goes to, and watches that the policy's vLLM serves them.

`Watch` looks every second, and makes vLLM serve the live version again after an outage. `Prober` sends the servers the
same prompt every few minutes. A label of weights proves nothing: anybody could have set it. Each version's first answer
is kept. After every restart of a server and every few minutes it is sampled again, with the same seed. This detects
wholly other weights; a single training step changes less than two servers' arithmetic may differ.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from ...core.config.address import without_addresses
from ...core.config.policy import PolicyConfig
from ...core.config.root import Config
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import Conflict, LightningError, NotFound, StoreUnavailable, UpstreamTimeout, UpstreamUnreachable
from ...core.records import PolicyVersion, RolloutName
from ...serving.health import Health, replica_name
from ...serving.mode import ModeInUse
from ...serving.swap import NotServed, Pins, Swap
from ...serving.vllm import VllmError, VllmFault, VllmServer
from ...store.store import Store
from ...store.versions import Probed
from .upstream import Route

log = logging.getLogger(__name__)

# Says which version answers a rollout, given the live one: another one where two versions are compared.
Choose = Callable[[RolloutName, PolicyVersion], Awaitable[PolicyVersion]]

WATCH_S = 1.0
MENDED_S = 3.0  # that a look waits for servers that are being mended

Wanted = tuple[int, Mapping[str, int]]  # the live version, and by URL those of servers that are to have another

PROBE_S = 120.0  # between two questions to one server
LOOK_S = 1.0  # until a restart is noticed
TOLERANCE = 0.2  # mean difference of log-probabilities; bfloat16 alone makes up to 0.1

# By position: the sampled token, and the log-probabilities of the most likely ones.
Scored = list[tuple[str, dict[str, float]]]


class PolicyRouter:
    """Routes each call by its rollout and the model that it asks for."""

    def __init__(
        self, config: Config, store: Store, pins: Pins, watch: Watch | None, choose: Choose | None = None
    ) -> None:
        """`watch`: that of the policy's vLLM; None without an upstream of kind vllm. Without `choose`, live answers."""
        self.alias = config.policy.alias
        self._policy = config.policy
        self._upstreams = config.upstreams
        self._named = models_by_upstream(config.upstreams)
        self._store = store
        self._pins = pins
        self._watch = watch
        self._choose = choose

    async def route(self, rollout: RolloutName, model: str | None, *, recorded: bool = False) -> Route:
        """Return the destination of a call of this rollout for this model. Raises NotServed, UpstreamTimeout.

        Only in a call that is `recorded` a rollout may begin with another version than the live one.
        """
        opened_for = await self._store.rollouts.model_of(rollout.rollout_id) if model == self.alias else None
        if opened_for is None:
            return await self._route(rollout, model, recorded)
        return _asking_for(opened_for, await self._route(rollout, opened_for, recorded))

    def alias_entry(self) -> dict[str, Any]:
        """Return the alias as an entry of `GET /v1/models`."""
        return {"id": self.alias, "object": "model", "created": int(time.time()), "owned_by": "lightning-proxy"}

    def of_alias(self) -> list[UpstreamConfig]:
        """Return the upstream that answers for the alias, and those that answer while it does not."""
        first = self._upstream_of(self.alias)
        return [first, *(route.upstream for route in self._fallbacks(first, self.alias))]

    async def _route(self, rollout: RolloutName, model: str | None, recorded: bool) -> Route:
        upstream = self._upstream_of(model)
        fallbacks = tuple(self._fallbacks(upstream, model)) if upstream.fallbacks else ()
        if self._watch is None or upstream is not self._watch.upstream:
            renamed = self._policy.model if model == self.alias else None
            return Route(upstream, upstream.model_map.get(model or "", renamed), None, fallbacks)
        try:
            route = await self._route_to_policy(self._watch, rollout, model, recorded)
        except (NotServed, UpstreamTimeout) as error:
            if not fallbacks:
                raise
            log.warning("upstream %s: %s; %s gets the call", upstream.name, error, fallbacks[0].upstream.name)
            return fallbacks[0]._replace(fallbacks=fallbacks[1:])
        adds_usage = any(self._watch.adds_usage.values())
        return route._replace(fallbacks=fallbacks, adds_usage=adds_usage) if fallbacks or adds_usage else route

    async def _route_to_policy(self, watch: Watch, rollout: RolloutName, model: str | None, recorded: bool) -> Route:
        upstream, (live, placed) = watch.upstream, await self._live_and_placed(watch)
        choose = self._choose if recorded and model == self.alias else None
        if watch.swap.mode == "merged":
            ours = model in (None, self.alias, watch.base)
            version, servers = await self._merged(watch, rollout, live, placed, choose)
            served = watch.base if model == self.alias else None
            return Route(upstream, served, version.version if ours else None, servers=servers)
        if model == self.alias:
            version = await self._version_of(rollout, live, choose)
            adapter = self._policy.adapter_of(rollout.agent)
            served = watch.base if version.version == 0 else version.adapters.get(adapter, version.served_model)
            return Route(upstream, served, version.version)
        named = 0 if model is None or model == watch.base else await self._store.versions.named(model)
        return Route(upstream, None, named, pins=False)

    async def _live_and_placed(self, watch: Watch) -> tuple[PolicyVersion, Mapping[str, PolicyVersion]]:
        """The live version, and the versions that servers have in its place, both as of the same check."""
        for _ in range(2):  # another one may become live between two readings
            await watch.require()
            live = await self._store.versions.live_now()
            placed = {} if watch.swap.placed is None else await watch.swap.placed()
            if watch.was_checked_for(live, placed):
                break
        return live, placed

    async def _merged(
        self,
        watch: Watch,
        rollout: RolloutName,
        live: PolicyVersion,
        placed: Mapping[str, PolicyVersion],
        choose: Choose | None,
    ) -> tuple[PolicyVersion, tuple[str, ...]]:
        """The version that answers, and the servers that have it (empty: any). Only one that is up can be chosen."""
        if not placed:
            return live, ()
        versions = {url: placed.get(url, live) for url in watch.upstream.urls}
        up = {versions[url].version: versions[url] for url in watch.up(versions)}
        version = live if live.version in up or not up else next(iter(up.values()))
        if choose is not None and len(up) > 1:
            chosen = await choose(rollout, live)
            version = up.get(chosen.version, version)
        return version, tuple(url for url, its in versions.items() if its.version == version.version)

    async def _version_of(self, rollout: RolloutName, live: PolicyVersion, choose: Choose | None) -> PolicyVersion:
        """The version that the rollout began with; one for it if it begins now; the live one if that is not served."""
        pin = await self._pins.of(rollout.rollout_id) if self._policy.pin_rollouts else None
        if pin is None and choose is not None:
            return await choose(rollout, live)
        if pin is None or pin == live.version:
            return live
        version = await self._store.versions.get(pin)
        # A version whose files were pruned cannot be served any more.
        servable = version.version == 0 or (version.path and version.publish == "lora")
        return version if servable else live

    def _upstream_of(self, model: str | None) -> UpstreamConfig:
        if model == self.alias and self._watch is not None:
            return self._watch.upstream
        return self._named.get(model or "", self._upstreams[0])

    def _fallbacks(self, upstream: UpstreamConfig, model: str | None) -> Iterator[Route]:
        """Those of the upstream, each followed by its own; not those that cannot have a name for the model."""
        named = {other.name: other for other in self._upstreams}
        left, seen = list(upstream.fallbacks), {upstream.name}
        while left:
            other = named[left.pop(0)]
            if other.name not in seen:
                seen.add(other.name)
                left = other.fallbacks + left
                if other.kind != "litellm" or model in other.models or model in other.model_map:
                    yield Route(other, other.model_map.get(model or ""), None)


def _asking_for(model: str, route: Route) -> Route:
    """The route of a call that names another model."""
    fallbacks = tuple(_asking_for(model, fallback) for fallback in route.fallbacks)
    return route._replace(model=route.model or model, fallbacks=fallbacks)


def models_by_upstream(upstreams: Sequence[UpstreamConfig]) -> dict[str, UpstreamConfig]:
    """Return the upstream of every model that one names, without names that only a fallback maps."""
    standing_by = {name for upstream in upstreams for name in upstream.fallbacks}
    named: dict[str, UpstreamConfig] = {}
    for upstream in upstreams:
        for model in (*upstream.models, *(() if upstream.name in standing_by else upstream.model_map)):
            named.setdefault(model, upstream)
    return named


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
        self._is_served = False  # vLLM serves what the store says is live
        # The version that was live at the last check of vLLM, and by URL the placed ones.
        self._checked_for: Wanted = (0, {})
        self._problem: LightningError | None = None

    async def run(self) -> None:
        """Check vLLM every second until cancelled."""
        try:
            while True:
                await self._check()
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
        if not self._is_served:
            await self._check(self.upstream.connect_timeout_s)
        elif len(self.upstream.published_to) > 1:
            await self._see_who_missed_the_live_version()
        if isinstance(self._problem, NotServed):
            raise self._problem

    def was_checked_for(self, live: PolicyVersion, placed: Mapping[str, PolicyVersion]) -> bool:
        """Return whether these were live and placed when the servers were looked at last."""
        return self._checked_for == _wanted(live, placed)

    def up(self, urls: Iterable[str]) -> tuple[str, ...]:
        """Return those of the upstream's servers that have no problem, as far as was seen."""
        return tuple(url for url in urls if not self._health.problems.get((self.upstream.name, url)))

    async def _see_who_missed_the_live_version(self) -> None:
        """Take servers without it out of rotation, before a call that needs it is sent."""
        for _ in range(2):  # a look that was under way may have begun before
            if self._checked_for != await self._wanted():
                await self._check(self.upstream.connect_timeout_s)

    async def _wanted(self) -> Wanted:
        placed = {} if self.swap.placed is None else await self.swap.placed()
        return _wanted(await self.swap.store.versions.live_now(), placed)

    async def _check(self, timeout: float | None = None) -> None:
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
            self._is_served, self._checked_for, self._problem = True, wanted, None
        except StoreUnavailable:  # it says nothing of vLLM; calls read the store, too, and get this error
            return
        except (UpstreamUnreachable, UpstreamTimeout) as error:
            self._set_problem(error, f"the policy is not served yet: {error}")
        except NotServed as error:
            self._set_problem(error, str(error))
        except LightningError as error:
            self._set_problem(NotServed(f"{error}: `lightning-proxy doctor` says what to do"), str(error))
        except Exception as error:  # the next look may find it mended
            unknown = NotServed(f"vLLM does not serve the live policy version: {error}")
            self._set_problem(unknown, "the live policy version cannot be served", exc_info=error)
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
            problems = await self.swap.problems()
        except LightningError:  # none has them; mending waits for a trainer that publishes, which may take minutes
            await asyncio.wait((self._mend(),), timeout=MENDED_S)
            return await self.swap.problems()
        if any(isinstance(problem, NotServed) for problem in problems.values()):
            self._mend()
        return problems

    def _mend(self) -> asyncio.Task[None]:
        """Give the live weights to servers that do not have them, while calls go on."""
        if self._mending is None or self._mending.done():
            self._mending = asyncio.create_task(self._restore())
        return self._mending

    async def _restore(self) -> None:
        try:
            await self.swap.restore(set())
        except LightningError as error:
            log.warning("servers without the live weights are not repaired: %s", error)

    def _set_problem(self, problem: LightningError, why: str, exc_info: Exception | None = None) -> None:
        """Log a problem once, not at every check while it stays the same: vLLM may be away for days."""
        if str(problem) != str(self._problem):
            log.warning("%s", why, exc_info=exc_info)
        problem.message = without_addresses(problem.message)  # which agents are shown
        self._is_served, self._problem = False, problem


def _wanted(live: PolicyVersion, placed: Mapping[str, PolicyVersion]) -> Wanted:
    return live.version, {url: version.version for url, version in placed.items()}


class Prober:
    """Compares what the servers sample with the live version's first answer. The store notes what is wrong."""

    def __init__(self, config: PolicyConfig, watch: Watch, health: Health) -> None:
        self._tolerance = config.verify_tolerance or TOLERANCE
        self._watch = watch
        self._swap = watch.swap
        self._health = health
        self._store = watch.swap.store
        self._probed: dict[str, tuple[PolicyVersion, float]] = {}  # by URL; with the time of the last question

    async def run(self) -> None:
        """Probe every server that needs it until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for server in self._swap.vllm.servers:
                try:
                    await self._look_at(server)
                except LightningError as error:  # it is away, has no such route, or the store is
                    log.debug("%s is not probed: %s", replica_name(server.base_url), error)

    async def _look_at(self, server: VllmServer) -> None:
        url, live = server.base_url, await self._store.versions.live_now()
        if self._health.problems.get((self._watch.upstream.name, url), "not seen yet") is not None:
            self._probed.pop(url, None)
            return
        if url not in self._probed:
            self._probed[url] = live, -math.inf
            self._watch.adds_usage[url] = await server.adds_usage()
        version, at = self._probed.get(url, (None, -math.inf))
        if version == live and monotonic() < at + PROBE_S:
            return
        self._probed[url] = live, monotonic()
        await self._compare(server, live)

    async def _compare(self, server: VllmServer, live: PolicyVersion) -> None:
        merged = self._swap.mode == "merged"
        if merged and not await self._swap.has_label(server, live):
            return
        if not merged and live.version == 0:
            return  # nothing can have replaced it: its operator routes load adapters only
        model = await server.base_model() if merged else str(live.served_model)
        answer = await server.probe(model)
        if await self._store.versions.live_now() != live or (merged and not await self._swap.has_label(server, live)):
            return  # other weights went live meanwhile
        first = await self._store.probes.of(live.version)
        if first is None or first.model != model:
            await self._store.probes.first(live.version, model, answer)
        else:
            await self._note_difference(server, live, first, difference(first.answer, answer))

    async def _note_difference(self, server: VllmServer, live: PolicyVersion, first: Probed, apart: float) -> None:
        problem = None
        if not apart <= self._tolerance:  # NaN too
            mend = f"`policy promote {live.version}`" if self._swap.mode == "merged" else "a restart of vLLM"
            name = self._watch.upstream.server_name(server.base_url)
            problem = (
                f"{name} does not answer as policy version {live.version} did: its "
                f"log-probabilities differ by {apart:.3g} on average ({self._tolerance:g} is allowed); {mend} loads "
                "the version again"
            )
        if problem != first.problem:
            log.log(logging.INFO if problem is None else logging.ERROR, "%s", problem or "the live version is back")
        await self._store.probes.found(live.version, problem)


def difference(first: list[Any], again: list[Any]) -> float:
    """Compute how far two answers' log-probabilities are apart, in nats on average; NaN if nothing can be compared.

    Positions count as long as the same tokens came before.
    """
    found: list[float] = []
    for (token, before), (other, now) in zip(first, again, strict=False):
        found += [abs(before[name] - now[name]) for name in before.keys() & now.keys()]
        if not before.keys() & now.keys():
            return math.inf
        if token != other:
            break
    return math.fsum(found) / len(found) if found else math.nan


class ModelCheck:
    """Refuses an unavailable model when a rollout is opened, so that its first call does not fail."""

    def __init__(self, config: Config, store: Store, swap: Swap | None) -> None:
        self._policy = config.policy
        self._named = models_by_upstream(config.upstreams)
        self._first = config.upstreams[0]
        self._store = store
        self._swap = swap

    async def require(self, policy_version: int | None, model: str | None) -> None:
        """Raise NotFound or Conflict if the model cannot be served. Both None means the live version, always served."""
        if policy_version is not None and model is not None:
            raise Conflict("policy_version and model exclude each other", param="model")
        if policy_version is not None:
            await self._require_version(policy_version)
        if model is not None and model not in self._named and not await self._first_serves(model):
            raise NotFound(f"no upstream serves the model {model!r}: name it in the `models` of one", param="model")

    async def _require_version(self, number: int) -> None:
        """Have the version served beside the live one; Conflict if it cannot be, NotFound if there is none."""
        version, live = await self._store.versions.get(number), await self._store.versions.live()
        if version.version == live.version:
            return
        if self._swap is None:
            raise Conflict("no upstream is of kind vllm: there are no policy versions", param="policy_version")
        if self._swap.mode == "merged":
            raise Conflict(
                f"policy version {number} is not served: with policy.publish: merged the live one alone is, version "
                f"{live.version}; promote it first (`eval --promote` does, and takes it back)",
                param="policy_version",
            )
        if not self._policy.pin_rollouts:
            raise Conflict("with policy.pin_rollouts: false only the live version answers", param="policy_version")
        _require_files(version)
        await self._swap.load(version)

    async def _first_serves(self, name: str) -> bool:
        """The first upstream gets every model that none names; only the policy's vLLM says which it has."""
        if self._swap is None or self._first.kind != "vllm":
            return self._first.kind != "litellm"
        return name == self._policy.alias or name in {model["id"] for model in await self._swap.vllm.models()}


def _require_files(version: PolicyVersion) -> None:
    if version.version == 0:
        return
    if version.publish != "lora":
        as_what = f"published as {version.publish}, and policy.publish is now lora"
        raise Conflict(f"policy version {version.version} was {as_what}", param="policy_version")
    if version.status in ("publishing", "failed") or version.path is None or not Path(version.path).is_dir():
        gone = "its files are gone (policy.keep_versions)" if version.status == "ready" else f"it is {version.status}"
        raise Conflict(f"policy version {version.version} cannot be served: {gone}", param="policy_version")
