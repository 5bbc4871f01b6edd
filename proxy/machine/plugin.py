"""Plugs in what runs here: the machine's memory, disks and queues, and the packages on board."""

from __future__ import annotations

from ..plugins.hooks import ProxyPlugin
from . import routes


class MachinePlugin(ProxyPlugin):
    """Says how the machine is used, and what is on board."""

    routers = (routes.router,)


plugin = MachinePlugin
