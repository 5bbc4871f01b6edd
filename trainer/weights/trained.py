"""The weights that a trainer trains: LoRA adapters on a frozen model, or the full model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.config.policy import DEFAULT_ADAPTER

Weights = dict[str, Tensor]


class Spread(Protocol):
    """How weights are spread over processes: a part of `step.processes.Processes`."""

    rank: int
    sharded: bool

    def gather(self, weight: Tensor) -> Tensor: ...
    def part(self, weight: Tensor, like: Tensor) -> Tensor: ...
    def local(self, weight: Tensor) -> Tensor: ...


class Trained(ABC):
    """Sets of weights that are trained apart, by `names`. Samples say by their `adapter` which they train.

    If they are `sharded`, each process has a part of them, and all processes must call these methods together.
    """

    names: tuple[str, ...]
    model: PreTrainedModel

    def __init__(self, spread: Spread) -> None:
        self._spread = spread

    @property
    def sharded(self) -> bool:
        return False

    @abstractmethod
    def prepare(self, place: Callable[[Any], Any]) -> Any:
        """Move all models to their device by `place`; return the one that TRL trains."""

    @abstractmethod
    def parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of these sets, by default of all."""

    def set_aside(self, name: str) -> list[nn.Parameter]:
        """Return the parameters whose gradients a pass sets aside, to undo it if memory runs out; may be none."""
        return self.parameters(name)

    @abstractmethod
    def activate(self, name: str) -> None:
        """Make the model use this set."""

    @abstractmethod
    def live(self, name: str) -> Weights:
        """Return the weights of a set themselves, not copies, by the names that they have in files."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[PreTrainedModel]:
        """Yield the model as it was before any training."""

    @abstractmethod
    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase, *, merged: bool) -> None:
        """Write what vLLM loads: with `merged` a full model, else adapters."""

    @abstractmethod
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint."""

    @abstractmethod
    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Give the optimizer the state from a checkpoint."""

    @property
    def writes(self) -> bool:
        """Return whether this process keeps and writes the weights that are gathered."""
        return self._spread.rank == 0

    def weights(self, name: str = DEFAULT_ADAPTER) -> Weights:
        """Return copies of a set's unsharded weights; nothing in a process that only helps to gather them."""
        found = {}
        for key, weight in self.live(name).items():
            gathered = self._spread.gather(weight)
            if self.writes or not self.sharded:
                found[key] = gathered.clone() if gathered is weight else gathered.cpu()
        return found

    def all_weights(self) -> dict[str, Weights]:
        return {name: self.weights(name) for name in self.names}

    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shape of every unsharded weight, by set and name."""
        return {name: {key: tuple(weight.shape) for key, weight in self.live(name).items()} for name in self.names}

    @torch.no_grad()
    def set(self, weights: Mapping[str, Weights]) -> None:
        """Replace the weights of these sets. If they are sharded, only process 0 need have the values."""
        for name, own in weights.items():
            live = self.live(name)
            for key, value in own.items():
                live[key].copy_(self._spread.part(value, live[key]))

    def copy(self, name: str) -> Weights:
        """Return a copy of this process's part of a set, in the machine's own memory."""
        return {key: self._spread.local(weight).to("cpu", copy=True) for key, weight in self.live(name).items()}

    @contextmanager
    def exchanged(self, name: str, copy: Weights) -> Iterator[None]:
        """Use the weights of a `copy` while the block runs. The copy holds the present ones meanwhile."""
        self._exchange(name, copy)
        try:
            yield
        finally:
            self._exchange(name, copy)

    @torch.no_grad()
    def _exchange(self, name: str, copy: Weights) -> None:
        """One weight at a time: a second copy of a full model may not fit."""
        for key, weight in self.live(name).items():
            local = self._spread.local(weight)
            present = local.to("cpu", copy=True)
            local.copy_(copy[key])
            copy[key].copy_(present)
