"""Several LoRA adapters on one base model, one of them active at a time: agents may have policies of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.config.policy import DEFAULT_ADAPTER
from ...core.errors import ConfigError
from ..files.weights import save_adapter, save_merged
from .trained import Spread, Trained, Weights

_PREFIX = "lora_"


class Adapters(Trained):
    """The adapters of `model`: its first one, `default`, and one for each of `names`. All are trainable."""

    def __init__(self, model: PeftModel, names: Iterable[str], spread: Spread) -> None:
        super().__init__(spread)
        self._model = model
        base = model.get_base_model()
        assert isinstance(base, PreTrainedModel)
        self.model = base
        # Sorted, because an optimizer's state goes by position.
        self.names = (DEFAULT_ADAPTER, *sorted(names))
        for name in self.names[1:]:
            _check_name(name, model)
            model.add_adapter(name, deepcopy(model.peft_config[DEFAULT_ADAPTER]))
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def prepare(self, place: Callable[[Any], Any]) -> Any:
        self._model = place(self._model)
        return self._model

    def parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of these adapters, by default of all, whichever is active."""
        chosen = names or self.names
        return [p for name, p in self._model.named_parameters() if _adapter_in(name) in chosen]

    def activate(self, name: str) -> None:
        if self._model.active_adapter != name:
            self._model.set_adapter(name)

    def live(self, name: str) -> Weights:
        """Return an adapter's weights under PEFT's names."""
        found: Weights = get_peft_model_state_dict(self._model, adapter_name=name)
        return found

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Yield the model with the adapters off."""
        with self._model.disable_adapter():
            yield self.model

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase, *, merged: bool) -> None:
        """Write the adapters, or the full model with the default adapter merged in."""
        if merged:
            save_merged(self._model, tokenizer, directory, gather=self._spread.gather, writes=self.writes)
        elif self.writes:
            save_adapter(self._model, directory)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)


def _adapter_in(parameter: str) -> str | None:
    """The adapter that a parameter belongs to: the part after lora_A or lora_B. None for the base model's."""
    parts = parameter.split(".")
    return next((after for part, after in pairwise(parts) if part.startswith(_PREFIX)), None)


def _check_name(name: str, model: PeftModel) -> None:
    """Refuse the name of a part of the model: PEFT finds an adapter's weights by its name among the parts of theirs."""
    parts = {part for parameter, _ in model.named_parameters() for part in parameter.split(".")}
    if name in parts or name in _PREFIX:
        raise ConfigError(f"policy.adapters: {name!r} is also the name of a part of the model; choose another name")
