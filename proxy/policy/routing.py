"""Which weights answer a call: the alias and its versions, also on a vLLM server that was restarted."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..config.root import Config
from ..config.upstreams import UpstreamConfig
from ..errors import Conflict, LightningError, NotFound, UpstreamTimeout, UpstreamUnreachable
from ..gateway.ports import Route
from ..power.upstream import power_of
from ..store.rollouts import Store
from ..store.training import Ledger
from ..types import PolicyVersion, PublishMode, RolloutName
from ..upstreams.health import Health
from .fleet import VllmFleet
from .vllm import Vllm

log = logging.getLogger(__name__)

WATCH_S = 1.0
PINS = 20_000


class NotServed(LightningError):
    """vLLM is there, but does not serve what the policy table says."""

    status = 503


class Superseded(LightningError):
    """Another version was made live by hand; what was to follow the one before it does not count any more."""

    status = 409


class Swap:
    """Puts a policy version behind the alias. One process at a time (a lock file), the proxy or the trainer."""

    def __init__(self, ledger: Ledger, vllm: Vllm | VllmFleet, mode: PublishMode, directory: Path) -> None:
        self.ledger = ledger
        self.vllm = vllm
        self.mode = mode
        self._lock_file = directory / "swap.lock"

    async def activate(
        self, version: PolicyVersion, step: int | None = None, *, expected: int | None = None, verified: bool = False
    ) -> None:
        """Load the version into vLLM and move the alias to it; running requests go on.

        Superseded, and nothing changed, if `expected` is given and another version is live. `verified`: it was seen
        to be served.
        """
        async with self._locked():
            self._check_mode(version)
            live = await self.ledger.live()
            if expected not in (None, live.version):
                raise Superseded(f"policy version {live.version} was made live meanwhile")
            if self.mode == "lora":
                await self.load(version)
                await self.ledger.set_live(version.version, step, verified=verified)
            else:
                await self._replace(self.vllm, version, lambda: self.ledger.set_live(version.version, step))

    async def serves(self, version: PolicyVersion) -> bool:
        """Whether merged weights in vLLM carry the label of this version."""
        return await self.vllm.weight_version() in _labels(version)

    async def load(self, version: PolicyVersion) -> None:
        """Serve the version's adapters beside the others; the base model has none."""
        for name, path in _adapters(version).items():
            await self.vllm.load_adapter(name, path)

    async def unload(self, version: PolicyVersion) -> None:
        """Serve none of them any more."""
        for name in version.served_models:
            await self.vllm.unload_adapter(name)

    async def restore(self, pinned: set[int]) -> dict[str, LightningError | None]:
        """Make vLLM serve what the policy table says: after its restart, or after a process died in mid-swap.

        Returns, by URL, why a replica does not; raises if none does.
        """
        async with self._locked():
            self._check_mode(await self.ledger.live())
            if self.mode == "merged":
                return await self.vllm.each(self._restore_weights)
            return await self.vllm.each(lambda server: self._restore_adapters(server, pinned))

    async def _restore_weights(self, server: Vllm) -> None:
        live = await self.ledger.live()
        if await server.weight_version() not in _labels(live):
            log.warning("vLLM does not serve policy version %d: loading it again", live.version)
            await self._replace(server, live, _nothing)
        elif await server.is_paused():
            log.warning("vLLM was left paused: resuming it")
            await server.resume()

    async def _restore_adapters(self, server: Vllm, pinned: set[int]) -> None:
        served = {model["id"] for model in await server.models()}
        for version in await self.ledger.versions():
            wanted = version.path and (version.status == "live" or version.version in pinned)
            if wanted and version.publish == self.mode and not served.issuperset(version.served_models):
                log.warning("vLLM does not serve policy version %d: loading it again", version.version)
                await self._load_again(server, version)

    async def _load_again(self, server: Vllm, version: PolicyVersion) -> None:
        try:
            for name, path in _adapters(version).items():
                await server.load_adapter(name, path)
        except NotFound:
            if version.status == "live":
                raise
            log.warning("policy version %d has lost its files: its rollouts go on with the live one", version.version)
            await self.ledger.forget_files(version.version)

    def _check_mode(self, version: PolicyVersion) -> None:
        if version.publish not in (None, self.mode):
            raise NotServed(
                f"policy version {version.version} was published as {version.publish}, and policy.publish is now "
                f"{self.mode}: set it back, promote version 0, or start the trainer, which publishes it anew"
            )

    async def _replace(
        self, server: Vllm | VllmFleet, version: PolicyVersion, committed: Callable[[], Awaitable[None]]
    ) -> None:
        path = _files(version) if version.version else await self._base_files()
        await server.replace_weights(path, _labels(version)[0], committed)

    async def _base_files(self) -> str:
        root = next((m["root"] for m in await self.vllm.models() if m.get("parent") is None), None)
        if root is None:
            raise NotFound("vLLM does not say where the base model's files are")
        return str(root)

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        self._lock_file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock_file.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.05)
            yield


class Policy:
    """Routes calls to upstreams and policy versions, and watches the policy's vLLM server."""

    def __init__(self, config: Config, store: Store, ledger: Ledger, swap: Swap | None, health: Health) -> None:
        self.alias = config.policy.alias
        self._config = config
        self._store = store
        self._ledger = ledger
        self._swap = swap
        self._health = health
        self._upstream = next((u for u in config.upstreams if u.kind == "vllm"), None)
        self._named = models_by_upstream(config.upstreams)
        self._pins: OrderedDict[str, int] = OrderedDict()
        self._base: str | None = None
        self._look: asyncio.Task[None] | None = None
        self._in_line = False
        self._in_line_for = 0  # the version that was live when vLLM was looked at last
        self._problem: LightningError | None = None

    # Routing -------------------------------------------------------------------------------------------------------

    async def route(self, rollout: RolloutName, model: str | None) -> Route:
        """Where a call of this rollout for this model goes. An unreachable vLLM is left for the call itself to meet."""
        chosen = self._store.model_of(rollout.rollout_id) if model == self.alias else None
        if chosen is None:
            return await self._route(rollout, model)
        return _asking_for(chosen, await self._route(rollout, chosen))

    async def _route(self, rollout: RolloutName, model: str | None) -> Route:
        if self._swap is not None and (alpha := power_of(model)) is not None:
            return await self._route_to_power(self._swap, rollout, alpha)
        upstream = self._upstream_of(model)
        fallbacks = tuple(self._fallbacks(upstream, model)) if upstream.fallbacks else ()
        if upstream is not self._upstream or self._swap is None:
            renamed = self._config.policy.model if model == self.alias else None
            return Route(upstream, upstream.model_map.get(model or "", renamed), None, fallbacks)
        try:
            route = await self._route_to_policy(self._swap, upstream, rollout, model)
        except (NotServed, UpstreamTimeout) as error:
            if not fallbacks:
                raise
            log.warning("upstream %s: %s; %s gets the call", upstream.name, error, fallbacks[0].upstream.name)
            return fallbacks[0]._replace(fallbacks=fallbacks[1:])
        return route._replace(fallbacks=fallbacks) if fallbacks else route

    async def _route_to_policy(
        self, swap: Swap, upstream: UpstreamConfig, rollout: RolloutName, model: str | None
    ) -> Route:
        if not self._in_line:
            await self._get_in_line(upstream.connect_timeout_s)
        elif upstream.replicas:
            await self._see_who_missed_the_live_version(upstream.connect_timeout_s)
        if isinstance(self._problem, NotServed):
            raise self._problem
        live = self._ledger.live_now()
        if swap.mode == "merged":
            ours = model in (None, self.alias, self._base)
            return Route(upstream, self._base if model == self.alias else None, live.version if ours else None)
        if model == self.alias:
            version = await self._pinned(rollout, live)
            adapter = self._config.policy.adapter_of(rollout.agent)
            served = self._base if version.version == 0 else version.adapters.get(adapter, version.served_model)
            return Route(upstream, served, version.version)
        asked = 0 if model in (None, self._base) else await self._version_named(model)
        return Route(upstream, None, asked, pins=False)

    async def _route_to_power(self, swap: Swap, rollout: RolloutName, alpha: float) -> Route:
        assert self._upstream is not None
        base = await self._route_to_policy(swap, self._upstream, rollout, None)
        if base.version != 0:
            raise NotFound(f"power:{alpha:g} samples from the base model, and version {base.version} is in its place")
        return Route(self._upstream, self._base, None, pins=False, power=alpha)

    def forget(self, rollout_id: str) -> None:
        """The rollout was deleted: under its name another one may begin, with the version that is live then."""
        self._pins.pop(rollout_id, None)

    def alias_entry(self) -> dict[str, Any]:
        return {"id": self.alias, "object": "model", "created": int(time.time()), "owned_by": "lightning-proxy"}

    def _upstream_of(self, model: str | None) -> UpstreamConfig:
        if model == self.alias and self._upstream is not None:
            return self._upstream
        return self._named.get(model or "", self._config.upstreams[0])

    def _fallbacks(self, upstream: UpstreamConfig, model: str | None) -> Iterator[Route]:
        """Those of the upstream, each followed by its own; not those that cannot have a name for the model."""
        named = {other.name: other for other in self._config.upstreams}
        left, seen = list(upstream.fallbacks), {upstream.name}
        while left:
            other = named[left.pop(0)]
            if other.name not in seen:
                seen.add(other.name)
                left = other.fallbacks + left
                if other.kind != "litellm" or model in other.models or model in other.model_map:
                    yield Route(other, other.model_map.get(model or ""), None)

    async def _pinned(self, rollout: RolloutName, live: PolicyVersion) -> PolicyVersion:
        if not self._config.policy.pin_rollouts:
            return live
        pin = self._pins.get(rollout.rollout_id)
        if pin is None:
            pin = await self._recorded_pin(rollout.rollout_id)
        pin = live.version if pin is None else pin
        version = live if pin == live.version else await self._ledger.version(pin)
        # A version whose files were pruned cannot be served any more.
        servable = version.version == 0 or (version.path and version.publish == "lora")
        return version if servable else live

    async def _recorded_pin(self, rollout_id: str) -> int | None:
        """The version that the rollout began with, whichever process answered its first call; None before that."""
        try:
            pin = (await self._store.rollout(rollout_id)).policy_version
        except NotFound:
            return None
        if pin is not None:
            self._pins[rollout_id] = pin
            if len(self._pins) > PINS:
                self._pins.popitem(last=False)
        return pin

    async def _version_named(self, model: str | None) -> int | None:
        return next((v.version for v in await self._ledger.versions() if model in v.served_models), None)

    # Operations ----------------------------------------------------------------------------------------------------

    async def promote(self, version: int) -> PolicyVersion:
        """Make a version live by hand; Conflict if its files are gone or it failed."""
        if self._swap is None:
            raise Conflict("no upstream of kind vllm is configured: there are no policy versions to serve")
        found = await self._ledger.version(version)
        if version and (found.path is None or found.status in ("failed", "publishing")):
            raise Conflict(f"policy version {version} is {found.status} and has no files to serve", param="version")
        await self._swap.activate(found)
        return await self._ledger.live()

    async def rollback(self) -> PolicyVersion:
        """Make the newest version before the live one live again."""
        live = await self._ledger.live()
        earlier = [
            v for v in await self._ledger.versions()
            if v.version < live.version and v.status == "ready" and (v.path or v.version == 0)
        ]  # fmt: skip
        if not earlier:
            raise Conflict(f"there is no version before {live.version} to go back to")
        return await self.promote(earlier[-1].version)

    async def reachable(self) -> bool:
        """Whether the policy's upstream answers; True where there is none to ask."""
        if self._swap is None:
            return True
        try:
            await self._swap.vllm.models()
        except LightningError:
            return False
        return True

    async def watch(self) -> None:
        """Look at vLLM every second, and put it in line after it was away. Runs until cancelled."""
        while self._swap is not None:
            await self._get_in_line()
            await asyncio.sleep(WATCH_S)

    async def _get_in_line(self, timeout: float | None = None) -> None:
        """Let vLLM serve what the policy table says; everybody waits for the same look, for `timeout` s at most.

        Raises UpstreamTimeout if it takes longer.
        """
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_at_vllm())
        _, pending = await asyncio.wait((self._look,), timeout=timeout)
        if pending:
            raise UpstreamTimeout(f"the policy's server does not answer within {timeout} s")

    async def _see_who_missed_the_live_version(self, timeout: float) -> None:
        """Replicas that do not serve it must be out of rotation before a call that is to reach it goes out."""
        for _ in range(2):  # a look that was under way may have begun before
            if self._in_line_for != self._ledger.live_now().version:
                await self._get_in_line(timeout)

    async def _look_at_vllm(self) -> None:
        assert self._swap is not None
        live = self._ledger.live_now().version
        problems: dict[str, LightningError | None] = {}
        try:
            self._base = await self._swap.vllm.base_model()
            since = time.time() - self._config.policy.pin_timeout_s
            problems = await self._swap.restore(set(self._pins.values()) | await self._ledger.pinned(since))
            self._in_line, self._in_line_for, self._problem = True, live, None
        except (UpstreamUnreachable, UpstreamTimeout) as error:
            self._fall_out_of_line(error, f"the policy is not served yet: {error}")
        except NotServed as error:
            self._fall_out_of_line(error, str(error))
        except Exception as error:  # whatever vLLM answered; the next look may find it mended
            unknown = NotServed(f"vLLM does not serve the live policy version: {error}")
            self._fall_out_of_line(unknown, "the live policy version cannot be served", exc_info=error)
        assert self._upstream is not None
        for url in self._upstream.urls:
            problem = problems.get(url, self._problem)
            self._health.report(self._upstream.name, url, None if problem is None else str(problem))

    def _fall_out_of_line(self, problem: LightningError, story: str, exc_info: Exception | None = None) -> None:
        """Told once, not at every look for as long as it stays the same: vLLM may be away for days."""
        if str(problem) != str(self._problem):
            log.warning("%s", story, exc_info=exc_info)
        self._in_line, self._problem = False, problem


def _asking_for(model: str, route: Route) -> Route:
    """The route of a call that names another model."""
    fallbacks = tuple(_asking_for(model, fallback) for fallback in route.fallbacks)
    return route._replace(model=route.model or model, fallbacks=fallbacks)


def models_by_upstream(upstreams: Sequence[UpstreamConfig]) -> dict[str, UpstreamConfig]:
    """The upstream of every model that one names; the names that only a fallback maps are none of these."""
    standing_by = {name for upstream in upstreams for name in upstream.fallbacks}
    named: dict[str, UpstreamConfig] = {}
    for upstream in upstreams:
        for model in (*upstream.models, *(() if upstream.name in standing_by else upstream.model_map)):
            named.setdefault(model, upstream)
    return named


async def _nothing() -> None:
    """Nothing is to be committed: the version is live already."""


def _files(version: PolicyVersion) -> str:
    if version.path is None or not Path(version.path).is_dir():
        raise NotFound(f"the files of policy version {version.version} are gone: {version.path}")
    return version.path


def _adapters(version: PolicyVersion) -> dict[str, str]:
    """Where the files of each adapter are, by the name that it is served under; NotFound if they are gone."""
    if version.version == 0:
        return {}
    path = _files(version)
    found = {str(version.served_model): path} | {name: f"{path}/{own}" for own, name in version.adapters.items()}
    if gone := [path for path in found.values() if not Path(path).is_dir()]:
        raise NotFound(f"files of policy version {version.version} are gone: {gone[0]}")
    return found


def _labels(version: PolicyVersion) -> tuple[str, ...]:
    """vLLM's weight version for ours. The time tells stores apart; `default` is vLLM's after a start."""
    label = f"{version.version}-{int(version.created_at)}"
    return (label,) if version.version else (label, "default")
