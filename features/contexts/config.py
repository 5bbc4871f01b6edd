"""Keys of `trainer`: what becomes of rejected attempts and of summaries."""

from __future__ import annotations

from typing import Literal

from ...core.config.trainer import TrainerConfig


class ContextKeys(TrainerConfig):
    rejected: Literal["leave_out", "negative", "as_others"] = "leave_out"
    summaries: Literal["train", "leave_out"] = "train"
