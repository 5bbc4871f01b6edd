"""The rules by which rewards count in training: those of `core/returns.py`, and a judge's scores beside them. Pure."""

from __future__ import annotations

from ...core.config.trainer import TrainerConfig
from ...core.returns import Rules

JUDGE = "judge"  # the name of a judge's rewards


def training_rules(config: TrainerConfig) -> Rules:
    """Return how rewards count in training. A judge's scores count beside the return that is shown."""
    return Rules.of(config)._replace(weights=config.training_weights)
