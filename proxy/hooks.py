"""Defines plugins of the proxy: routes, fields, and hooks named after what happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import BaseModel

from ..core.config.root import Config
from ..core.config.upstreams import UpstreamConfig
from ..core.redact import Redactor
from ..serving.swap import Placed
from ..store.store import Store
from .gateway.call import OnCall, Rewrite
from .gateway.metrics import Metrics
from .gateway.routing import Choose
from .gateway.upstream import Upstream

Fields = Mapping[str, Any]  # of JSON
OnDeleted = Callable[[str], None]  # is called with the id of each deleted rollout
Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that a plugin gets when the proxy opens. `redactor` removes secrets from stored texts."""

    config: Config
    store: Store
    redactor: Redactor
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Hooks:
    """A plugin's hooks while the proxy is open. A hook that no plugin uses adds no cost to calls."""

    choose: Choose | None = None  # says which version of the policy answers a rollout that begins
    placed: Placed | None = None  # says which servers have merged weights of another version than the live one
    rewrite: Rewrite | None = None  # changes what the model is shown, which is what the record has
    on_call: OnCall | None = None
    on_deleted: OnDeleted | None = None
    work: Sequence[Work] = ()  # runs along with the calls until the proxy closes


class ProxyPlugin:
    """A feature of the proxy, or a third-party package. `__init__` raises ConfigError if the plugin cannot run.

    `key_id`: the caller may see only what comes from rollouts opened with this key; with None, everything.
    """

    routers: ClassVar[Sequence[APIRouter]] = ()
    # Makes the upstreams of kinds that do not offer OpenAI's API.
    upstreams: ClassVar[Mapping[str, Callable[[UpstreamConfig], Upstream]]] = {}
    # Models of the core's bodies and answers, each with a model of the added fields, which also checks bodies.
    fields: ClassVar[Sequence[tuple[type[Any], type[BaseModel]]]] = ()

    def __init__(self, config: Config) -> None:
        self.config = config

    async def check(self) -> None:
        """Raise ConfigError if the plugin cannot do what is configured. Called before anything starts."""

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        """Yield the hooks. At the end, after the last call, close what was opened."""
        yield Hooks()

    async def check_rollouts(self, store: Store, added: Any) -> None:
        """Raise LightningError if rollouts cannot be opened with `added`, the plugin's fields of a `RolloutsBody`."""

    async def rollouts_opened(self, store: Store, rollout_ids: Sequence[str], added: Any) -> None:
        """Store the plugin's fields of the request that opened rollouts."""

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        """Return fields for `GET /rollouts/{rollout_id}`."""
        return {}

    async def status_fields(self, store: Store, key_id: str | None) -> Fields:
        """Return fields for `GET /status`."""
        return {}

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        """Return fields for `GET /policy`."""
        return {}

    async def version_fields(self, store: Store, key_id: str | None) -> Callable[[int], Fields]:
        """Return a function that, given a version's number, returns its fields for `GET /policy/versions`."""
        return lambda _: {}

    async def measure(self, store: Store, metrics: Metrics) -> None:
        """Set the plugin's gauges. Called before metrics are shown."""
