"""Plugs in what people say: thumbs in an application, and the queue of those who rate rollouts."""

from __future__ import annotations

from ..plugins.hooks import ProxyPlugin
from . import rating, thumbs


class PeoplePlugin(ProxyPlugin):
    """Takes people's rewards, which are named `human`."""

    routers = (rating.router, thumbs.router, thumbs.open_router)


plugin = PeoplePlugin
