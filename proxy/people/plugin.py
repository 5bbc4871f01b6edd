"""Plugs in the queue of people who rate rollouts, and the way back."""

from __future__ import annotations

from ..plugins.hooks import ProxyPlugin
from . import rating


class PeoplePlugin(ProxyPlugin):
    """Takes people's rewards, which are named `human`."""

    routers = (rating.router,)


plugin = PeoplePlugin
