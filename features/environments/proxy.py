"""Plugs the environments in: a route that says what rollouts earned in each."""

from __future__ import annotations

from ...proxy.hooks import ProxyPlugin
from . import routes


class EnvironmentsPlugin(ProxyPlugin):
    """Says what rollouts earned in each environment."""

    routers = (routes.router,)


plugin = EnvironmentsPlugin
