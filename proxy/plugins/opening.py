"""Opens the plugins of the features, and those that the configuration names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic.json_schema import JsonSchemaMode

from ...core.config.root import Config
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import ConfigError
from ...core.features import modules
from ...core.records import RolloutName
from ...serving.swap import Placed
from ..api.bodies import Body
from ..gateway.call import OnCall, Question, Rewrite, unchanged
from ..gateway.routing import Choose
from ..gateway.upstream import Upstream
from ..hooks import Core, OnDeleted, ProxyPlugin, Work
from .others import plugin_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugged:
    """The hooks of all plugins together, as the core calls them."""

    choose: Choose | None
    placed: Placed | None
    rewrite: Rewrite
    on_call: tuple[OnCall, ...]
    on_deleted: tuple[OnDeleted, ...]
    work: tuple[Work, ...]


def plugins_of(config: Config) -> list[ProxyPlugin]:
    """Return the plugins of the features and of the configuration. Raise ConfigError if one cannot run."""
    features = [module.plugin(config) for module in modules("proxy")]
    others = [plugin_of(name, config) for name in config.plugins]
    return [*features, *(plugin for plugin in others if plugin is not None)]


async def check_plugins(config: Config) -> None:
    """Raise ConfigError if a plugin cannot do what the configuration asks for."""
    for plugin in plugins_of(config):
        await plugin.check()


def makers_of(plugins: Sequence[ProxyPlugin]) -> dict[str, Callable[[UpstreamConfig], Upstream]]:
    """Return the makers of upstreams by kind."""
    return {kind: make for plugin in plugins for kind, make in plugin.upstreams.items()}


def with_fields(document: Callable[[], dict[str, Any]], plugins: Sequence[ProxyPlugin]) -> dict[str, Any]:
    """Return the OpenAPI document with the fields of plugins in the core's bodies and answers."""
    made = document()
    schemas = made["components"]["schemas"]
    for core, model in (pair for plugin in plugins for pair in plugin.fields):
        mode: JsonSchemaMode = "validation" if issubclass(core, Body) else "serialization"
        added = model.model_json_schema(ref_template="#/components/schemas/{model}", mode=mode)
        for name, schema in added.pop("$defs", {}).items():
            schemas.setdefault(name, schema)
        described = schemas[core.__name__]
        described["properties"] |= added["properties"]
        if "description" in added:
            described["description"] += f"\n\n{added['description']}"
        if "required" in added:
            described.setdefault("required", []).extend(added["required"])
    return made


@asynccontextmanager
async def open_plugins(plugins: Sequence[ProxyPlugin], core: Core) -> AsyncIterator[Plugged]:
    """Open plugins in their order, and close them in reverse. Raise ConfigError if two have an exclusive hook."""
    async with AsyncExitStack() as stack:
        hooks = [await stack.enter_async_context(plugin.opened(core)) for plugin in plugins]
        yield Plugged(
            choose=_only([one.choose for one in hooks if one.choose is not None], "choose"),
            placed=_only([one.placed for one in hooks if one.placed is not None], "placed"),
            rewrite=_in_turn([one.rewrite for one in hooks if one.rewrite is not None]),
            on_call=tuple(one.on_call for one in hooks if one.on_call is not None),
            on_deleted=tuple(one.on_deleted for one in hooks if one.on_deleted is not None),
            work=tuple(work for one in hooks for work in one.work),
        )


def _only(hooks: Sequence[T], name: str) -> T | None:
    if len(hooks) > 1:
        raise ConfigError(f"plugins: {len(hooks)} of them have the hook {name}, which only one may have")
    return hooks[0] if hooks else None


def _in_turn(rewrites: Sequence[Rewrite]) -> Rewrite:
    """Each rewrites the question of the one before it."""
    if len(rewrites) < 2:
        return rewrites[0] if rewrites else unchanged

    async def rewrite(question: Question, rollout: RolloutName) -> Question:
        for one in rewrites:
            question = await one(question, rollout)
        return question

    return rewrite
