"""Defines the training engine, as the loop and the publisher use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...core.config.policy import DEFAULT_ADAPTER
from ...core.config.trainer import TrainerConfig
from ..rate import Rate
from ..types import Batch, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from ..report.trackers import Trackers


class TrainingEngine(Protocol):
    """Holds the policy's weights and takes steps on them: `LightningTrainer`, or a service (`features/tinker/`).

    `skipped_because`, `left_out_because` and `warnings` (by name) are about the last step.

    Any method may raise TrainingUnavailable. Unsaved state is then lost; `load` restores the saved state.
    """

    settings: TrainerConfig
    rate: Rate
    trackers: Trackers
    skipped_because: str | None
    left_out_because: str | None
    warnings: dict[str, str]

    @property
    def max_tokens(self) -> int:
        """Return the length of the longest sample that can be trained on, in tokens."""

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the model has embeddings for."""

    def forward_backward(self, batch: Batch) -> None:
        """Compute a batch's gradients, replacing earlier ones. The weights do not change."""

    def optim_step(self) -> dict[str, float]:
        """Update the weights with the last batch's gradients. Return the metrics of the batch and of the step."""

    def scores_of(self, samples: Sequence[Sample], *, served: bool = False) -> list[list[float]]:
        """Return the log-probabilities of each row's answers under their sampling parameters; 0.0 for all other tokens.

        `served` means the same as in `logprobs`.
        """

    def logprobs(
        self, token_ids: Sequence[Sequence[int]], adapter: str = DEFAULT_ADAPTER, *, served: bool = False
    ) -> list[list[float]]:
        """Return each token's log-probability at temperature 1; 0.0 for the first of each row.

        With `served`, use the weights that were remembered as served. An engine that remembers none uses its current
        weights; then log-probabilities cannot show which weights are served.
        """

    def remember_served(self, adapter: str = DEFAULT_ADAPTER) -> None:
        """Remember an adapter's current weights as served, for `logprobs` and `scores_of` to score with later."""

    def adapter(self, name: str = DEFAULT_ADAPTER) -> Mapping[str, Tensor]:
        """Return an adapter's weights under PEFT's names."""

    def save_weights(self, directory: Path, *, merged: bool) -> None:
        """Write what vLLM loads: adapters, or with `merged` a full model."""

    def save(self, directory: Path) -> None:
        """Write a checkpoint. `directory` appears atomically."""

    def load(self, directory: Path) -> int:
        """Resume from a checkpoint. Return the number of the last step that it includes."""

    def end(self) -> None:
        """Let the other processes end. Not called after an error, so that they fail too."""

    def close(self) -> None:
        """Let the trackers finish their files, and release resources. Always called."""
