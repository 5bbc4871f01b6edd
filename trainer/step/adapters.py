"""Several LoRA adapters on one base model, one of them active at a time: agents may have policies of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from itertools import pairwise

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from ...proxy.config.policy import DEFAULT_ADAPTER
from ...proxy.errors import ConfigError

Weights = dict[str, Tensor]
_PREFIX = "lora_"


class Adapters:
    """The adapters of `model`: its first one, `default`, and one for each of `names`. All are trainable."""

    def __init__(self, model: PeftModel, names: Iterable[str]) -> None:
        self._model = model
        # Sorted, because an optimizer's state goes by position.
        self.names = (DEFAULT_ADAPTER, *sorted(names))
        for name in self.names[1:]:
            _check_name(name, model)
            model.add_adapter(name, deepcopy(model.peft_config[DEFAULT_ADAPTER]))
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of these adapters, by default of all, whichever is active."""
        chosen = names or self.names
        return [p for name, p in self._model.named_parameters() if _adapter_in(name) in chosen]

    def activate(self, name: str) -> None:
        """Make the model use this adapter."""
        if self._model.active_adapter != name:
            self._model.set_adapter(name)

    def weights(self, name: str = DEFAULT_ADAPTER) -> Weights:
        """Return a copy of an adapter's weights, under PEFT's names."""
        found = get_peft_model_state_dict(self._model, adapter_name=name)
        return {key: value.clone() for key, value in found.items()}

    def all_weights(self) -> dict[str, Weights]:
        return {name: self.weights(name) for name in self.names}

    @torch.no_grad()
    def set(self, weights: Mapping[str, Weights]) -> None:
        """Replace the weights of these adapters."""
        for name, own in weights.items():
            set_peft_model_state_dict(self._model, own, adapter_name=name)


def _adapter_in(parameter: str) -> str | None:
    """The adapter that a parameter belongs to: the part after lora_A or lora_B. None for the base model's."""
    parts = parameter.split(".")
    return next((after for part, after in pairwise(parts) if part.startswith(_PREFIX)), None)


def _check_name(name: str, model: PeftModel) -> None:
    """Refuse the name of a part of the model: PEFT finds an adapter's weights by its name among the parts of theirs."""
    parts = {part for parameter, _ in model.named_parameters() for part in parameter.split(".")}
    if name in parts or name in _PREFIX:
        raise ConfigError(f"policy.adapters: {name!r} is also the name of a part of the model; choose another name")
