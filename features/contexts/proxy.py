"""Plugs in the counts of contexts that the status shows."""

from __future__ import annotations

from ...proxy.plugins.hooks import ProxyPlugin
from .beside import ContextsBeside


class ContextsPlugin(ProxyPlugin):
    """Counts the edges between calls."""

    beside = ContextsBeside


plugin = ContextsPlugin
