"""The section `contexts`: what becomes of rejected attempts and of summaries in training."""

from __future__ import annotations

from typing import Literal

from ...core.config.feature import FeatureSection


class ContextsConfig(FeatureSection):
    name = "contexts"
    moved = {"trainer.rejected": "contexts.rejected", "trainer.summaries": "contexts.summaries"}

    rejected: Literal["leave_out", "negative", "as_others"] = "leave_out"
    summaries: Literal["train", "leave_out"] = "train"
