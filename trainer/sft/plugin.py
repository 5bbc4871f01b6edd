"""Plugs imitation in (`train --method sft`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tuning.plugin import TuningPlugin

if TYPE_CHECKING:
    from ..tuning.fit import Recipe


class SftPlugin(TuningPlugin):
    """Fine-tunes on the best rollouts."""

    methods = ("sft",)

    def recipe(self, method: str) -> Recipe[Any]:
        from .sft import SFT

        return SFT


plugin = SftPlugin
