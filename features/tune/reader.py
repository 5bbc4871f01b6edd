"""Reads rewarded rollouts as the policy sampled them: what pairs and thumbs are chosen from."""

from __future__ import annotations

from ...core.config.trainer import TrainerConfig
from ...store.store import Store
from ...trainer.types import Sift
from .config import TuneConfig
from .rollouts import RolloutReader, as_sampled


class SampledReader:
    """Reads from the store what a method learns preferences from."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        max_tokens: int,
        vocabulary: int | None = None,
        sift: Sift | None = None,
    ) -> None:
        """A row has at most `max_tokens` tokens. `vocabulary` is the number of the model's tokens (None: any)."""
        self._dpo, self._kto = config.section(TuneConfig).dpo, config.section(TuneConfig).kto
        self._rollouts = RolloutReader(config, store, as_sampled, max_tokens, vocabulary, sift)
