"""Chooses by `trainer.weights` which weights are trained, and in which precision."""

from __future__ import annotations

import torch
from peft import LoraConfig
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path

from ...core.config.policy import PolicyConfig
from ...core.config.trainer import TrainerConfig
from .adapters import Adapters
from .full import FullModel
from .targets import lora_config
from .trained import Spread, Trained

# How far apart rounding alone takes the mean log-probability of two implementations.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}


def compute_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype that the model is computed in, and that vLLM is given its weights in."""
    name = {"auto": "bfloat16" if torch.cuda.is_available() else "float32"}.get(config.dtype, config.dtype)
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def tolerance(config: TrainerConfig, policy: PolicyConfig) -> float:
    """Return the largest mean difference of log-probabilities that rounding explains, in nats."""
    return policy.verify_tolerance or TOLERANCE[compute_dtype(config)]


def weight_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype of the model's weights. Trained ones are float32: bfloat16 would round small updates away."""
    return torch.float32 if config.weights == "full" else compute_dtype(config)


def uses_autocast(config: TrainerConfig) -> bool:
    """Return whether the model is computed in bfloat16 under autocast."""
    return compute_dtype(config) == torch.bfloat16 and (torch.cuda.is_available() or config.weights == "full")


def load_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model on the CPU; the trainer moves it to its one device.

    A device map would spread it over all GPUs, or over the CPU if their memory is short.
    """
    model = create_model_from_path(path, dtype=dtype, device_map=None, trust_remote_code=False)
    assert isinstance(model, PreTrainedModel)
    return model


def peft_config(config: TrainerConfig, model: PreTrainedModel) -> LoraConfig | None:
    """Return PEFT's configuration of the adapters; None if there are none."""
    return lora_config(config, model) if config.weights == "lora" else None


def trained(model: PreTrainedModel, config: TrainerConfig, policy: PolicyConfig, spread: Spread) -> Trained:
    """Return the trained weights of `model`, which has LoRA layers if there is a `peft_config`."""
    if config.weights == "lora":
        return Adapters(model, policy.adapters, spread)
    base = None
    if config.kl_coef or config.kl_metric:
        base = load_model(str(policy.model), compute_dtype(config)).requires_grad_(False)
    return FullModel(model, base, spread, compute_dtype(config))
