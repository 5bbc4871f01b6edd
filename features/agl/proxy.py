"""Plugs in what agents of Agent Lightning 1.0 post."""

from __future__ import annotations

from ...proxy.hooks import ProxyPlugin
from . import events


class AglPlugin(ProxyPlugin):
    """Serves AGL_EVENT_URL."""

    routers = (events.router,)


plugin = AglPlugin
