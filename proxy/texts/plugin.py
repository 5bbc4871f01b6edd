"""Plugs the texts of tokens in: a route that reads them, off the way of a call."""

from __future__ import annotations

from ..plugins.hooks import ProxyPlugin
from . import routes


class TextsPlugin(ProxyPlugin):
    """Shows what was sampled as text."""

    routers = (routes.router,)


plugin = TextsPlugin
