"""Plugs the costs in: a route that sums them up, and a field of rollouts."""

from __future__ import annotations

from ...proxy.plugins.hooks import ProxyPlugin
from . import routes
from .beside import CostsBeside


class CostsPlugin(ProxyPlugin):
    """Says what calls used and cost."""

    routers = (routes.router,)
    beside = CostsBeside


plugin = CostsPlugin
