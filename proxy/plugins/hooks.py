"""Defines what a plugin of the proxy is: routes, and hooks that are named after what happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter

from ...core.config.root import Config
from ...core.config.upstreams import UpstreamConfig
from ...core.redact import Redactor
from ...serving.swap import Placed
from ...store.store import Store
from ..api.beside import Beside
from ..gateway.call import OnCall, Rewrite
from ..gateway.metrics import Metrics
from ..gateway.routing import Choose
from ..gateway.upstream import Upstream

OnDeleted = Callable[[str], None]  # hears the id of each rollout that was deleted
Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that a plugin gets when the proxy opens. `redactor` removes secrets from texts that are kept."""

    config: Config
    store: Store
    redactor: Redactor
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Hooks:
    """The additions of a plugin to an open proxy. A hook that no plugin has costs a call nothing.

    `choose` says which version of the policy answers a rollout that begins. `placed` says which servers have merged
    weights of another version than the live one. `rewrite` changes what the model is shown, and the
    record has what the model was shown. `work` runs beside the calls until the proxy closes.
    """

    choose: Choose | None = None
    placed: Placed | None = None
    rewrite: Rewrite | None = None
    on_call: OnCall | None = None
    on_deleted: OnDeleted | None = None
    work: Sequence[Work] = ()


class ProxyPlugin:
    """A side room of the proxy, or a package of somebody else. Raise ConfigError in `__init__` if it cannot run.

    `upstreams` makes those of kinds that do not speak as OpenAI does.
    """

    routers: ClassVar[Sequence[APIRouter]] = ()
    beside: ClassVar[type[Beside]] = Beside
    upstreams: ClassVar[Mapping[str, Callable[[UpstreamConfig], Upstream]]] = {}

    def __init__(self, config: Config) -> None:
        self.config = config

    async def check(self) -> None:
        """Raise ConfigError if the plugin cannot do what is configured. Called before anything starts."""

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        """Yield the hooks. What it opened closes at the block's end, after the last call."""
        yield Hooks()
