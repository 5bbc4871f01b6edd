"""Plugs preferences in (`train --method dpo` and `kto`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tuning.plugin import TuningPlugin

if TYPE_CHECKING:
    from ..tuning.fit import Recipe


class PreferencesPlugin(TuningPlugin):
    """Learns from pairs of siblings, or from thumbs up and down."""

    methods = ("dpo", "kto")

    def recipe(self, method: str) -> Recipe[Any]:
        if method == "dpo":
            from .dpo import DPO

            return DPO
        from .kto import KTO

        return KTO


plugin = PreferencesPlugin
