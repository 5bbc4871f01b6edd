"""The full model, all of whose weights are trained: embeddings, norms and head too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.config.policy import DEFAULT_ADAPTER
from ...core.errors import LightningError
from ..files.weights import save_model
from .trained import Spread, Trained, Weights


class FullModel(Trained):
    """The weights of `model`, as one set. A weight that several modules share counts once.

    `base` is a frozen copy of the model before training, where one is needed. Files are written in `dtype`.
    """

    names = (DEFAULT_ADAPTER,)

    def __init__(
        self, model: PreTrainedModel, base: PreTrainedModel | None, spread: Spread, dtype: torch.dtype
    ) -> None:
        super().__init__(spread)
        self.model = model
        self._base = base
        self._dtype = dtype

    @property
    def sharded(self) -> bool:
        return self._spread.sharded

    def prepare(self, place: Callable[[Any], Any]) -> Any:
        if self._base is not None:
            self._base = place(self._base)
        self.model = place(self.model)
        return self.model

    def parameters(self, *names: str) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def set_aside(self, name: str) -> list[nn.Parameter]:
        """Return none: the gradients of all weights are not kept twice."""
        return []

    def activate(self, name: str) -> None:
        """Do nothing: there is one set."""

    def live(self, name: str) -> Weights:
        return {key: parameter.detach() for key, parameter in self.model.named_parameters()}

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Yield the frozen copy."""
        assert self._base is not None, "trainer.kl_coef and trainer.kl_metric load it"
        yield self._base

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase, *, merged: bool) -> None:
        """Write the full model; LightningError if adapters are asked for."""
        if not merged:
            raise LightningError("with trainer.weights: full there is no adapter to write")
        save_model(self.model, tokenizer, directory, self._dtype, gather=self._spread.gather, writes=self.writes)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state by the names of weights: over ranks their order is another one."""
        named = self._packed_names(optimizer)
        found: dict[str, Any] = {}
        for place, moments in optimizer.state_dict()["state"].items():
            gathered = {key: self._spread.gather(value) for key, value in moments.items()}
            if self.writes or not self.sharded:
                found[named[place]] = {key: v.cpu() if self.sharded else v for key, v in gathered.items()}
        return found

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        packed = optimizer.state_dict()
        packed["state"] = {
            place: {
                key: self._spread.part(value, parameters[name]) if value.dim() else value
                for key, value in state[name].items()
            }
            for place, name in enumerate(self._packed_names(optimizer))
            if name in state
        }
        optimizer.load_state_dict(packed)

    def _packed_names(self, optimizer: Any) -> list[str]:
        """The names of the optimizer's parameters, in the order that its state dict counts them in."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
