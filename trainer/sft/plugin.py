"""Plugs imitation in (`train --method sft`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tuning.plugin import TuningPlugin

if TYPE_CHECKING:
    from ..tuning.run import TuningRun


class SftPlugin(TuningPlugin):
    """Fine-tunes on the best rollouts."""

    methods = ("sft",)

    def run_of(self, method: str) -> type[TuningRun[Any]]:
        from .sft import SftRun

        return SftRun


plugin = SftPlugin
