"""Plugs OpenTelemetry in: spans of recorded calls go out, and spans of agents come in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...core.config.root import Config
from ...proxy.hooks import Core, Hooks, ProxyPlugin
from . import receive
from .config import OtelConfig
from .export import Telemetry, require_sdk


class OtelPlugin(ProxyPlugin):
    """Receives spans always; exports calls where `otel.otlp_endpoint` is set."""

    routers = (receive.router,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._telemetry = config.section(OtelConfig)
        require_sdk(self._telemetry)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        if self._telemetry.otlp_endpoint is None:
            yield Hooks()
            return
        telemetry = Telemetry(self._telemetry, core.redactor)
        try:
            yield Hooks(on_call=telemetry.call_ended)
        finally:
            await telemetry.close()


plugin = OtelPlugin
