"""Makes the adapter of a merged version, and the merged model of an adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ...core.config.policy import DEFAULT_ADAPTER
from ...core.config.root import Config
from ...trainer.files.weights import write_adapter, write_merged
from ...trainer.weights.targets import lora_config

disable_progress_bar()


def merge(base: str, adapter: Path, target: Path) -> None:
    """Write base + adapter as an ordinary model to an empty directory, in the base's own precision."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(adapter))
    write_merged(model, AutoTokenizer.from_pretrained(base), target)


def adapter_of(config: Config, checkpoint: Path, target: Path) -> None:
    """Write the adapter of a checkpoint, in PEFT's format, to an empty directory."""
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(str(config.policy.model), dtype="auto")
    tuned = get_peft_model(model, lora_config(config.trainer, model))
    assert isinstance(tuned, PeftModel)
    set_peft_model_state_dict(tuned, state["adapters"][DEFAULT_ADAPTER])
    write_adapter(tuned, target)
