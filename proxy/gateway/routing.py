"""Decides the upstream, model and policy version that a call goes to."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from ...core.config.root import Config
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import UpstreamTimeout
from ...core.records import PolicyVersion, RolloutName
from ...serving.swap import NotServed, Pins
from ...store.store import Store
from .upstream import Route
from .watch import Watch

log = logging.getLogger(__name__)

# Says which version answers a rollout, given the live one: another one where two versions are compared.
Choose = Callable[[RolloutName, PolicyVersion], Awaitable[PolicyVersion]]


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
            if watch.is_in_line_for(live, placed):
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
