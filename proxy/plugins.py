"""Plugs features and third-party packages into the proxy (see docs/architecture.md).

Third-party plugins cannot make a call fail: hooks that calls wait for have time limits, and errors are only logged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from ..core.config.root import Config
from ..core.config.upstreams import UpstreamConfig
from ..core.errors import ConfigError
from ..core.features import load_plugin, modules
from ..core.json_text import encode
from ..core.records import CallEnd, CallStart, RolloutName
from .api.bodies import Body
from .api.requests import AdminRoute, AgentRoute
from .gateway.call import Question, Rewrite
from .gateway.upstream import Upstream
from .hooks import Core, Hooks, ProxyPlugin, Work

__all__ = ["AdminRoute", "AgentRoute", "Core", "Hooks", "ProxyPlugin"]

log = logging.getLogger(__name__)

LIMIT_S = 5.0  # for one hook of one call
WAITING = 1_000  # calls that wait for a hook; further ones it misses

T = TypeVar("T")


def plugins_of(config: Config) -> list[ProxyPlugin]:
    """Return the plugins of features and of configured packages. Raises ConfigError if one cannot run."""
    plugins: list[ProxyPlugin] = [module.plugin(config) for module in modules("proxy")]
    for name in config.plugins:
        if (made := getattr(load_plugin(name), "proxy", None)) is None:
            continue
        try:
            plugin = made(config)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"plugins: {name} cannot be started: {type(error).__name__}: {error}") from error
        for route in (route for router in plugin.routers for route in router.routes):
            if not isinstance(route, AgentRoute) or not route.path.startswith(f"/plugins/{name}/"):
                raise ConfigError(
                    f"plugins: the routes of {name} must begin with /plugins/{name}/ and be in a router with "
                    "route_class=AgentRoute"
                )
        plugins.append(OthersPlugin(name, plugin))
    return plugins


async def check_plugins(config: Config) -> None:
    for plugin in plugins_of(config):
        await plugin.check()


def makers_of(plugins: Sequence[ProxyPlugin]) -> dict[str, Callable[[UpstreamConfig], Upstream]]:
    return {kind: make for plugin in plugins for kind, make in plugin.upstreams.items()}


def add_fields(schemas: dict[str, Any], plugins: Sequence[ProxyPlugin]) -> None:
    """Add the fields of plugins to the core's bodies and answers in an OpenAPI document."""
    for core, model in (pair for plugin in plugins for pair in plugin.fields):
        added = model.model_json_schema(
            ref_template="#/components/schemas/{model}",
            mode="validation" if issubclass(core, Body) else "serialization",
        )
        for name, schema in added.pop("$defs", {}).items():
            schemas.setdefault(name, schema)
        described = schemas[core.__name__]
        described["properties"] |= added["properties"]
        if "description" in added:
            described["description"] += f"\n\n{added['description']}"
        if "required" in added:
            described.setdefault("required", []).extend(added["required"])


# By hook: what replaces its result if it fails.
_OTHERWISE: Mapping[str, Any] = {
    "rollouts_opened": None, "rollout_fields": {}, "status_fields": {}, "policy_fields": {},
    "version_fields": lambda _: {}, "measure": None,
}  # fmt: skip


class OthersPlugin(ProxyPlugin):
    """Runs a third-party plugin. Its hooks `choose` and `placed` and its `upstreams` are ignored."""

    def __init__(self, name: str, plugin: ProxyPlugin) -> None:
        super().__init__(plugin.config)
        self._name, self._plugin = name, plugin
        for same in ("routers", "fields", "check_rollouts"):
            setattr(self, same, getattr(plugin, same))
        for hook, otherwise in _OTHERWISE.items():
            setattr(self, hook, partial(self._within, hook, otherwise, getattr(plugin, hook)))

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        calls = asyncio.Queue[tuple[CallStart, CallEnd, Mapping[str, str]]](WAITING)
        async with self._plugin.opened(core) as hooks:
            hear, forget = hooks.on_call, hooks.on_deleted

            def on_call(start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
                try:
                    calls.put_nowait((start, end, headers))
                except asyncio.QueueFull:
                    log.warning("plugin %s: its hook on_call is too slow and misses call %s", self._name, start.call_id)

            async def tell(hear: Callable[..., Any]) -> None:
                ask = hear if inspect.iscoroutinefunction(hear) else partial(asyncio.to_thread, hear)
                while True:
                    await self._within("on_call", None, ask, *await calls.get())

            def on_deleted(rollout_id: str) -> None:
                try:
                    forget and forget(rollout_id)
                except Exception:
                    log.exception("plugin %s: its hook on_deleted failed", self._name)

            work: list[Work] = [partial(self._within, "work", None, work) for work in hooks.work]
            yield Hooks(
                rewrite=hooks.rewrite and partial(self._rewritten, hooks.rewrite),
                on_call=hear and on_call,
                on_deleted=on_deleted,
                work=[*work, partial(tell, hear)] if hear else work,
            )

    async def _rewritten(self, hook: Rewrite, question: Question, rollout: RolloutName) -> Question:
        async def rewrite() -> Question:
            made = await hook(question, rollout)
            if made.body is question.body:
                return made
            return made._replace(request=made.request.with_body(encode(made.body)))  # the model is sent these bytes

        return await self._within("rewrite", question, rewrite)

    async def _within(self, name: str, otherwise: T, hook: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The hook's result, or `otherwise` if it raises or exceeds its time limit."""
        try:
            return await asyncio.wait_for(hook(*args), None if name == "work" else LIMIT_S)
        except TimeoutError:
            log.error("plugin %s: its hook %s took longer than %g s", self._name, name, LIMIT_S)
        except Exception:
            log.exception("plugin %s: its hook %s failed", self._name, name)
        return otherwise
