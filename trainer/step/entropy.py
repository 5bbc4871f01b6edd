"""The entropy bonus of the loss: a fixed weight, or one that is adapted to hold the entropy at a target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.config.trainer import EntropyConfig


class EntropyBonus:
    """Decides the weight of the mean entropy in the loss, as TRL does (`entropy_coef`, `use_adaptive_entropy`).

    With a target, the weight grows by `delta` after each step whose entropy is at or below the target, and shrinks
    after the others. It counts only after a step at or below the target (Skywork-OR1, arXiv 2505.22312, section 3.2).
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._coef = config.coef
        self._is_low = config.target is None

    @property
    def weight(self) -> float:
        """Return the weight in the next step."""
        return self._coef if self._is_low else 0.0

    def update(self, entropy: float) -> None:
        """Note the mean entropy of a step."""
        config = self._config
        if config.target is None:
            return
        self._is_low = entropy <= config.target
        change = config.delta if self._is_low else -config.delta
        self._coef = min(max(self._coef + change, 0.0), config.max_coef)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"coef": self._coef, "is_low": self._is_low}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint. A fixed weight is the configured one."""
        if self._config.target is not None and state:
            self._coef, self._is_low = min(state["coef"], self._config.max_coef), state["is_low"]


def entropy_term(entropies: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """Return the term that (A, L) entropies, where `mask` is 1, add to the mean over all `tokens` of the step."""
    return (entropies * mask).sum() / tokens
