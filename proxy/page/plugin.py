"""Plugs the page in, and the feed that keeps it up to date."""

from __future__ import annotations

from ..plugins.hooks import ProxyPlugin
from . import feed, page


class PagePlugin(ProxyPlugin):
    """Serves the page at `/` and its events at `/feed`."""

    routers = (feed.router, page.router)
    beside = feed.FeedBeside


plugin = PagePlugin
