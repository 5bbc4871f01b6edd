"""Lists the trainer's side rooms that are on board, and opens them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from typing import Any

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.on_board import modules
from .hooks import Run, TrainerCore, TrainerHooks, TrainerPlugin


def methods() -> list[str]:
    """Return what `train --method` may be."""
    return ["rl", *(method for kind in _kinds() for method in kind.methods)]


def plugins_of(config: Config) -> list[TrainerPlugin]:
    """Return the plugins of the side rooms."""
    return [kind(config) for kind in _kinds()]


def check(config: Config, run: Run) -> None:
    """Raise ConfigError if a side room cannot do what is asked for."""
    for plugin in plugins_of(config):
        plugin.check(run)


@asynccontextmanager
async def open_plugins(plugins: Sequence[TrainerPlugin], core: TrainerCore) -> AsyncIterator[TrainerHooks]:
    """Open plugins in their order, and close them in reverse. Raise ConfigError if two have the same hook."""
    async with AsyncExitStack() as stack:
        hooks = [await stack.enter_async_context(plugin.opened(core)) for plugin in plugins]
        yield TrainerHooks(**{hook.name: _only(hooks, hook.name) for hook in fields(TrainerHooks)})


def _kinds() -> list[type[TrainerPlugin]]:
    return [module.plugin for module in modules("trainer")]


def _only(hooks: Sequence[TrainerHooks], name: str) -> Any:
    found = [hook for one in hooks if (hook := getattr(one, name)) is not None]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} side rooms of the trainer have the hook {name}, which only one may have")
    return found[0] if found else None
