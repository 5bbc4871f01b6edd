"""Plugs in what is shown of evaluations (`evaluation`), which the trainer makes, and of the best version."""

from __future__ import annotations

from ...proxy.plugins.hooks import ProxyPlugin
from .beside import EvaluationBeside


class EvaluationPlugin(ProxyPlugin):
    """Shows evaluations and the best version beside policy versions."""

    beside = EvaluationBeside


plugin = EvaluationPlugin
