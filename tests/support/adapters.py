"""Adapters with weights that change what a model says, and what transformers and PEFT make of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def save_adapter(model: Path, directory: Path, seed: int = 0) -> Path:
    """Files of an adapter of the model."""
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(directory)
    return directory


def logprobs_with(model: Path, adapter: Path, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Of each token of the answer."""
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    with torch.no_grad():
        logits = adapted(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return found
