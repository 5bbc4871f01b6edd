"""Makes policy versions live, gives vLLM back versions that it has lost, and resumes paused servers."""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic

from ..core.config.address import shown
from ..core.errors import Conflict, LightningError, NotFound, PublishError, UpstreamUnreachable
from ..core.records import PolicyVersion, PublishMode
from ..store.store import Store
from .vllm import AWAY, LOADING, VllmError, VllmFault, VllmFleet, VllmServer

log = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0  # a server without operator routes
LEAVE_S = 3.0  # until every proxy has seen that a server has no version's label, and sends it no call
DRAIN_S = 120.0  # for requests under way; those that take longer are frozen, and finish with the new weights
DRAIN_POLL_S = 0.2
LOADED = "loaded "  # precedes the label of weights that do not answer agents yet

# The servers with merged weights of another version than the live one, by URL.
Placed = Callable[[], Awaitable[Mapping[str, PolicyVersion]]]
# By server, why it does not serve the versions that it should; None if it does.
Problems = dict[VllmServer, LightningError | None]
Check = Callable[[VllmServer], Awaitable[None]]


class NotServed(LightningError):
    """vLLM is running, but cannot serve a version, does not serve it yet, or does not say whether it does."""

    status = 503


class Superseded(LightningError):
    """A version cannot follow the live one, because another was made live or is being tested."""

    status = 409


class Swap:
    """Makes versions live. A lock file lets only one process (proxy or trainer) do so at a time."""

    def __init__(
        self, store: Store, vllm: VllmFleet, mode: PublishMode, directory: Path, placed: Placed | None = None
    ) -> None:
        self.store, self.vllm, self.mode, self.placed = store, vllm, mode, placed
        self._locked = partial(swap_lock, directory)
        self._refused: dict[VllmServer, tuple[VllmError, float]] = {}

    async def activate(
        self, version: PolicyVersion, step: int | None = None, *, expected: int | None = None, verified: bool = False
    ) -> None:
        """Load the version into vLLM and make it live. Raises Superseded if `expected` (None: any) is not live.

        Merged weights go to all servers at once; if that fails, requests stay frozen until `restore`.
        """
        async with self._locked():
            await self._require_successor(version, expected)
            if self.mode == "lora":
                await self.load(version)
                await self.store.versions.set_live(version.version, step, verified=verified)
            else:
                path, label = await self._weights(version), labels_of(version)[0]
                loaded = await self.vllm.ask(lambda server: server.load_weights(path))
                await self.store.versions.set_live(version.version, step)
                await self.vllm.ask(lambda server: server.go_on(label), loaded)

    async def roll(self, version: PolicyVersion, step: int | None, expected: int, check: Check) -> None:
        """Give the version's merged weights to one server after another; once half have them, the version goes live.

        For that, `check` must pass on at least one server, and on every server of that half that stays reachable.
        """
        async with self._locked():
            await self._require_successor(version, expected)
            reachable, problems = await self.vllm.reachable(), Problems()
            with suppress(LightningError):
                problems = await self.problems()
            # Servers that answer nobody come first, so that there is always one that answers.
            servers = sorted(reachable, key=lambda server: problems.get(server) is None)
            half = (len(servers) + 1) // 2
            set_live = partial(self.store.versions.set_live, version.version, step, verified=True)
            await self._give_all(version, servers[:half], check, set_live)
            for server in servers[half:]:
                try:
                    await self._give(server, version, check)
                except VllmError as error:  # the proxy's watch will repair it
                    log.warning("%s does not have the live weights yet: %s", shown(server.base_url), error)

    async def _give_all(
        self, version: PolicyVersion, servers: Sequence[VllmServer], check: Check, commit: Callable[[], Awaitable[None]]
    ) -> None:
        """Give new weights to one server after another, then `commit`. On failure, all get their old weights back."""
        try:
            if not any([await self._give(server, version, check) for server in servers]):
                raise UpstreamUnreachable("no server could be given the new weights: vLLM went down")
            await commit()
        except BaseException:
            await asyncio.shield(self._give_back(servers))
            raise

    async def _give(self, server: VllmServer, version: PolicyVersion, check: Check) -> bool:
        """Give a server new weights and `check` them while it gets no calls. Return False if it cannot be reached."""
        path, label = await self._weights(version), labels_of(version)[0]
        try:
            await server.name_weights(LOADING)
            await asyncio.sleep(LEAVE_S)
            begun = monotonic()
            while left := await server.requests():
                if monotonic() > begun + DRAIN_S:
                    log.warning("%s: %d open requests will finish with the new weights", shown(server.base_url), left)
                    break
                await asyncio.sleep(DRAIN_POLL_S)
            await server.load_weights(path)
            await server.go_on(LOADED + label)
            try:
                await check(server)
            except PublishError:
                if await server.weight_version() == LOADED + label:
                    raise
            if await server.weight_version() != LOADED + label:
                raise UpstreamUnreachable(f"{shown(server.base_url)} restarted while its weights were being verified")
            await server.name_weights(label)
        except AWAY as error:
            log.warning("a server is left out of publishing: %s", error)
            return False
        return True

    async def _give_back(self, servers: Sequence[VllmServer]) -> None:
        """Give servers the weights that they should have. The proxy's watch repairs failures."""
        for server in servers:
            try:
                await self._mend_weights(server, only_look=False)
            except LightningError as error:
                log.warning("%s does not have its old weights back yet: %s", shown(server.base_url), error)

    async def promote(self, number: int) -> PolicyVersion:
        """Make this version live. Raises Conflict if it has no files or its publishing failed or has not ended."""
        version = await self.store.versions.get(number)
        if number and (version.path is None or version.status in ("failed", "publishing")):
            raise Conflict(f"policy version {number} cannot go live: {obstacle(version, self.mode)}", param="version")
        await self.activate(version)
        return await self.store.versions.live()

    async def rollback(self) -> PolicyVersion:
        """Return to the newest earlier version that was live and can be again. Raises Conflict if there is none."""
        live = (await self.store.versions.live()).version
        if (earlier := await self.store.versions.before(live)) is None:
            raise Conflict(f"there is no version before {live} to go back to")
        return await self.promote(earlier.version)

    async def has_label(self, server: VllmServer | VllmFleet, version: PolicyVersion) -> bool:
        """Return whether the merged weights of a server, or of all, carry this version's label, verified or not."""
        return (await server.weight_version()).removeprefix(LOADED) in labels_of(version)

    async def load(self, version: PolicyVersion) -> None:
        files_of(version)
        await self.vllm.ask(lambda server: server.load_adapters(adapters_of(version)))

    async def unload(self, version: PolicyVersion) -> None:
        await self.vllm.ask(lambda server: server.unload_adapters(version.served_models))

    async def problems(self, pinned: Collection[int] = (), *, only_look: bool = True) -> Problems:
        """Return, for each server, why it does not serve the versions that it should; None if it does.

        Unless `only_look`, servers first get what they lack. Raises one of the problems if every server has one.
        """
        self._require_mode(await self.store.versions.live())
        if self.mode == "merged":
            return await self.vllm.each(partial(self._mend_weights, only_look=only_look))
        return await self.vllm.each(partial(self._mend_adapters, pinned, only_look=only_look))

    async def restore(self, pinned: Collection[int]) -> Problems:
        """Give servers what they lack, and return the remaining problems. Raises one if every server has one."""
        async with self._locked():
            return await self.problems(pinned, only_look=False)

    async def _mend_weights(self, server: VllmServer, *, only_look: bool) -> None:
        """Give a server the merged weights that it lacks, and resume it; with `only_look`, raise NotServed instead."""
        placed = {} if self.placed is None else await self.placed()
        version = placed.get(server.base_url) or await self.store.versions.live()
        label = await self._label(server, version)
        is_right = label is None or label in labels_of(version)
        if label is None or (is_right and not await server.is_paused()):
            return
        if only_look:
            raise NotServed(f"vLLM does not serve policy version {version.version} yet")
        if is_right:
            log.warning("vLLM was left paused: resuming it")
            await server.resume()
            return
        log.warning("vLLM does not serve policy version %d: loading it again", version.version)
        await server.load_weights(await self._weights(version))
        await server.go_on(labels_of(version)[0])

    async def _label(self, server: VllmServer, version: PolicyVersion) -> str | None:
        """Return the label of a server's weights. If it has none, return None for a new store, else raise NotServed."""
        error, until = self._refused.get(server, (None, 0.0))
        if monotonic() >= until:
            self._refused.pop(server, None)
            try:
                return await server.weight_version()
            except VllmFault as fault:
                error = fault
            except VllmError as refused:
                error = refused
                self._refused[server] = error, monotonic() + ASK_AGAIN_S
        if server in self._refused and await self.store.versions.is_new():
            return None  # it serves its own weights, which are version 0
        raise NotServed(
            f"vLLM does not say whether it serves policy version {version.version} ({error}): `lightning-proxy doctor` "
            "shows what vLLM lacks for publishing"
        )

    def why_not_published(self) -> str | None:
        """Return why some server refuses new weights, according to its last check; None if none does."""
        return next((str(error) for error, _ in self._refused.values()), None)

    async def _mend_adapters(self, pinned: Collection[int], server: VllmServer, *, only_look: bool) -> None:
        served = await server.adapters()
        for version in await self.store.versions.to_serve(pinned):
            adapters = adapters_of(version) if version.publish == self.mode else {}
            missing = {name: path for name, path in adapters.items() if served.get(name, "") not in (path, None)}
            if not missing:
                continue
            if only_look:
                raise NotServed(f"vLLM does not serve policy version {version.version} yet")
            log.warning("vLLM does not serve policy version %d: loading it again", version.version)
            try:
                files_of(version)
                await server.load_adapters(missing)
            except NotFound:
                if version.status == "live":
                    raise
                log.warning("policy version %d has lost its files: its rollouts get the live version", version.version)
                await self.store.versions.forget_files(version.version)

    async def _require_successor(self, version: PolicyVersion, expected: int | None) -> None:
        """Raise NotServed if the version has another mode, and Superseded if `expected` is set and not live."""
        self._require_mode(version)
        live = (await self.store.versions.live()).version
        if expected not in (None, live):
            raise Superseded(f"policy version {live} was made live meanwhile")

    def _require_mode(self, version: PolicyVersion) -> None:
        if version.publish not in (None, self.mode):
            raise NotServed(
                f"policy version {version.version} was published as {version.publish}, and policy.publish is now "
                f"{self.mode}: set it back, promote version 0, or start the trainer, which publishes the version again"
            )

    async def _weights(self, version: PolicyVersion) -> str:
        """Return the directory of the version's merged weights; for version 0, the base model's, as vLLM names it."""
        if version.version:
            return files_of(version)
        for model in await self.vllm.first(VllmServer.models):
            if model.get("parent") is None and model.get("root") is not None:
                return str(model["root"])
        raise NotFound("vLLM does not say where the base model's files are")


@asynccontextmanager
async def swap_lock(directory: Path) -> AsyncIterator[None]:
    """Hold the lock of `policy.directory`: no other process may load weights or repair a server meanwhile."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "swap.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.05)
        yield


def obstacle(version: PolicyVersion, mode: PublishMode) -> str | None:
    """Return why a version cannot be made live in this publishing `mode`; None if it can."""
    if version.version == 0:
        return None
    if version.status == "failed":
        return "its publishing failed"
    if version.status == "publishing":
        return "it is being published"
    if version.path is None or not Path(version.path).is_dir():
        return "it has no files here (they were deleted by policy.keep_versions, or it was imported)"
    return None if version.publish in (None, mode) else f"it was published as {version.publish}"


def adapters_of(version: PolicyVersion) -> dict[str, str]:
    """Return the directory of each adapter, by served name; the base model has none."""
    if version.version == 0:
        return {}
    own = {name: f"{version.path}/{directory}" for directory, name in version.adapters.items()}
    return {str(version.served_model): str(version.path)} | own


def files_of(version: PolicyVersion) -> str:
    """Return the directory of a version's files. Raises NotFound if that directory, or an adapter's, is gone."""
    for path in adapters_of(version).values():
        if version.path is None or not Path(path).is_dir():
            raise NotFound(f"the files of policy version {version.version} are gone: {path}")
    return str(version.path)


def labels_of(version: PolicyVersion) -> tuple[str, ...]:
    """Return vLLM's labels for a version. Version 0 also has `default`, the label that vLLM starts with."""
    label = f"{version.version}-{int(version.created_at * 1000)}"
    return (label,) if version.version else (label, "default")
