"""Plugs litellm in: it reaches providers that do not speak as OpenAI does (`kind: litellm`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from ...core.config.upstreams import UpstreamConfig
from ...core.prices import require_litellm
from ...proxy.gateway.upstream import Upstream
from ...proxy.hooks import ProxyPlugin
from .upstream import LitellmUpstream


class LitellmPlugin(ProxyPlugin):
    """Makes upstreams of kind `litellm`."""

    upstreams: ClassVar[Mapping[str, Callable[[UpstreamConfig], Upstream]]] = {"litellm": LitellmUpstream}

    async def check(self) -> None:
        for upstream in self.config.upstreams:
            if upstream.kind == "litellm":
                require_litellm(f"upstream {upstream.name} of kind litellm")


plugin = LitellmPlugin
