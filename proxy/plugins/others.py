"""Keeps the plugins of others from failing a call: their hooks have limits, and an error in one is a line in the log.

A hook that blocks the event loop still stops everything, so a hook that is no coroutine runs in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.features import load_plugin
from ...core.json_text import encode
from ...core.records import CallEnd, CallStart, RolloutName
from ...store.store import Store
from ..api.requests import AgentRoute
from ..gateway.call import OnCall, Question, Rewrite
from ..gateway.metrics import Metrics
from ..hooks import Core, Fields, Hooks, ProxyPlugin, Work

log = logging.getLogger(__name__)

LIMIT_S = 5.0  # for one hook of one call
WAITING = 1_000  # calls that wait for a hook; further ones it misses

T = TypeVar("T")


def plugin_of(name: str, config: Config) -> ProxyPlugin | None:
    """Return the proxy's side of an installed plugin; None if it has none. Raise ConfigError if it cannot run."""
    made = getattr(load_plugin(name), "proxy", None)
    if made is None:
        return None
    try:
        plugin = made(config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"plugins: {name}: {type(error).__name__}: {error}") from error
    for route in (route for router in plugin.routers for route in router.routes):
        if not isinstance(route, AgentRoute) or not route.path.startswith(f"/plugins/{name}/"):
            raise ConfigError(
                f"plugins: {name}: its routes begin with /plugins/{name}/, and their router has route_class=AgentRoute"
            )
    return OthersPlugin(name, plugin)


class OthersPlugin(ProxyPlugin):
    """Runs the plugin of somebody else. It may choose no weights: `choose` and `placed` are the features' own."""

    def __init__(self, name: str, plugin: ProxyPlugin) -> None:
        super().__init__(plugin.config)
        self.routers, self.fields = plugin.routers, plugin.fields  # type: ignore[misc]
        self._name = name
        self._plugin = plugin

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        async with self._plugin.opened(core) as hooks, asyncio.TaskGroup() as group:
            listener: asyncio.Task[None] | None = None
            on_call = None
            if hooks.on_call is not None:
                calls: asyncio.Queue[tuple[CallStart, CallEnd, Mapping[str, str]]] = asyncio.Queue(WAITING)
                listener = group.create_task(self._tell(hooks.on_call, calls))
                on_call = self._queued(calls)
            yield Hooks(
                rewrite=None if hooks.rewrite is None else self._rewrite(hooks.rewrite),
                on_call=on_call,
                on_deleted=None if hooks.on_deleted is None else self._on_deleted(hooks.on_deleted),
                work=tuple(map(self._work, hooks.work)),
            )
            if listener is not None:
                listener.cancel()

    async def check_rollouts(self, store: Store, added: Any) -> None:
        await self._plugin.check_rollouts(store, added)

    async def rollouts_opened(self, store: Store, rollout_ids: Sequence[str], added: Any) -> None:
        await self._within("rollouts_opened", lambda: self._plugin.rollouts_opened(store, rollout_ids, added), None)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        return await self._within("rollout_fields", lambda: self._plugin.rollout_fields(store, rollout_id), {})

    async def status_fields(self, store: Store, key_id: str | None) -> Fields:
        return await self._within("status_fields", lambda: self._plugin.status_fields(store, key_id), {})

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        return await self._within("policy_fields", lambda: self._plugin.policy_fields(store, key_id), {})

    async def version_fields(self, store: Store, key_id: str | None) -> Callable[[int], Fields]:
        return await self._within("version_fields", lambda: self._plugin.version_fields(store, key_id), lambda _: {})

    async def measure(self, store: Store, metrics: Metrics) -> None:
        await self._within("measure", lambda: self._plugin.measure(store, metrics), None)

    def _rewrite(self, hook: Rewrite) -> Rewrite:
        async def rewrite(question: Question, rollout: RolloutName) -> Question:
            return await self._within("rewrite", lambda: rewritten(question, rollout), question)

        async def rewritten(question: Question, rollout: RolloutName) -> Question:
            made = await hook(question, rollout)
            if made.body is not question.body:  # the model is sent the request's bytes
                made = made._replace(request=made.request.with_body(encode(made.body)))
            return made

        return rewrite

    def _queued(self, calls: asyncio.Queue[tuple[CallStart, CallEnd, Mapping[str, str]]]) -> OnCall:
        def on_call(start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
            try:
                calls.put_nowait((start, end, headers))
            except asyncio.QueueFull:
                log.warning("plugin %s: its hook on_call is too slow, and misses call %s", self._name, start.call_id)

        return on_call

    async def _tell(
        self, hook: Callable[..., Any], calls: asyncio.Queue[tuple[CallStart, CallEnd, Mapping[str, str]]]
    ) -> None:
        is_plain = not inspect.iscoroutinefunction(hook)
        while True:
            call = await calls.get()
            ask = partial(asyncio.to_thread, hook, *call) if is_plain else partial(hook, *call)
            await self._within("on_call", ask, None)

    def _on_deleted(self, hook: Callable[[str], None]) -> Callable[[str], None]:
        def on_deleted(rollout_id: str) -> None:
            try:
                hook(rollout_id)
            except Exception:
                log.exception("plugin %s: its hook on_deleted failed", self._name)

        return on_deleted

    def _work(self, work: Work) -> Work:
        async def run() -> None:
            try:
                await work()
            except Exception:
                log.exception("plugin %s: its work beside the calls ended", self._name)

        return run

    async def _within(self, name: str, hook: Callable[[], Awaitable[T]], otherwise: T) -> T:
        """The hook's result; `otherwise` if it raises, or takes longer than its limit."""
        try:
            return await asyncio.wait_for(hook(), LIMIT_S)
        except TimeoutError:
            log.error("plugin %s: its hook %s took longer than %g s", self._name, name, LIMIT_S)
        except Exception:
            log.exception("plugin %s: its hook %s failed", self._name, name)
        return otherwise
