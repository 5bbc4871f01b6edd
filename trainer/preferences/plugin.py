"""Plugs preferences in (`train --method dpo` and `kto`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tuning.plugin import TuningPlugin

if TYPE_CHECKING:
    from ..tuning.run import TuningRun


class PreferencesPlugin(TuningPlugin):
    """Learns from pairs of siblings, or from thumbs up and down."""

    methods = ("dpo", "kto")

    def run_of(self, method: str) -> type[TuningRun[Any]]:
        if method == "dpo":
            from .dpo import DpoRun

            return DpoRun
        from .kto import KtoRun

        return KtoRun


plugin = PreferencesPlugin
