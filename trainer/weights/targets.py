"""Finds the modules that get LoRA by default: attention and MLP of the language model's layers."""

from __future__ import annotations

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError

# Parts of a layer that get no LoRA unless named. vLLM serves adapters of few of them.
LEFT_ALONE = frozenset(
    {"experts", "shared_expert", "shared_experts", "shared_expert_gate", "shared_mlp", "router", "gate"}
)


def lora_config(config: TrainerConfig, model: PreTrainedModel) -> LoraConfig:
    """Return PEFT's configuration of the adapters of `model`."""
    targets = config.lora_targets
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=language_targets(model) if targets == "language" else targets,
    )


def language_targets(model: PreTrainedModel) -> list[str]:
    """Return the linear modules in the layers of the language model, without experts, routers and other towers.

    They are named by their last part where that means no other module of the model. ConfigError if there are none.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    language = _prefix(model, model.get_decoder())
    chosen = {name for name in linear if name.startswith(language) and _is_in_a_layer(name)}
    if not chosen:
        raise ConfigError(
            f"trainer.lora_targets: no attention or MLP was found in {type(model).__name__}; name its modules"
        )
    last = {_last(name) for name in chosen}
    if all(name in chosen for name in linear if _last(name) in last):
        return sorted(last)
    return sorted(chosen)


def _prefix(model: nn.Module, part: nn.Module) -> str:
    """The name of a part, with a dot after it."""
    name = next((name for name, module in model.named_modules() if module is part), "")
    return f"{name}." if name else ""


def _is_in_a_layer(name: str) -> bool:
    parts = name.split(".")
    return any(part.isdigit() for part in parts) and not LEFT_ALONE & set(parts)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]
