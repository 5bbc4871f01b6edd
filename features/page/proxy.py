"""Plugs the page in, the feed that keeps it up to date, and the texts of tokens."""

from __future__ import annotations

from ...proxy.hooks import ProxyPlugin
from . import feed, page, texts


class PagePlugin(ProxyPlugin):
    """Serves the page at `/`, its events at `/feed`, and what was sampled as text."""

    routers = (feed.router, page.router, texts.router)


plugin = PagePlugin
