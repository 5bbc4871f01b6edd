"""Writes the policy's weights for vLLM: as a LoRA adapter, or as the whole model with the adapter merged in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .checkpoint import whole_directory

MARKER = "COMPLETE"


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapters in PEFT's format. `directory` appears whole, with a marker file, or not at all.

    The adapter `default` is in `directory` itself, each other one in a sub-directory of its name.
    """
    with whole_directory(directory) as temporary:
        write_adapter(model, temporary)
        (temporary / MARKER).touch()


def write_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapters in PEFT's format into a directory."""
    model.save_pretrained(str(directory))


def write_merged(model: PeftModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write base + LoRA as an ordinary model into a directory."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    _write_model(base, _merged_state(base, lambda weight: weight, keep=True), tokenizer, directory)


def save_merged(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    whole: Callable[[Tensor], Tensor] = lambda weight: weight,
    writes: bool = True,
) -> None:
    """Write base + LoRA as an ordinary checkpoint, whole or not at all. The weights in memory do not change.

    If the base is sharded, every process calls this with a `whole` that gathers a weight, and only one `writes`.
    """
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    state = _merged_state(base, whole, keep=writes)
    if not writes:
        return
    with whole_directory(directory) as temporary:
        _write_model(base, state, tokenizer, temporary)
        (temporary / MARKER).touch()


def _write_model(
    base: PreTrainedModel, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    base.save_pretrained(str(directory), state_dict=state)
    tokenizer.save_pretrained(str(directory))


@torch.no_grad()
def _merged_state(base: PreTrainedModel, whole: Callable[[Tensor], Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The state dict that `base` would have without PEFT, with W + BA·scale for each weight under a LoRA layer.

    With `keep=False` it only helps the other processes to gather theirs, and returns nothing.
    """
    deltas = {
        f"{name}.base_layer.weight": layer.get_delta_weight("default")
        for name, layer in base.named_modules()
        if isinstance(layer, LoraLayer)
    }
    merged = {}
    for name, part in base.state_dict().items():
        if ".lora_" in name:
            continue
        weight = whole(part)
        if not keep:
            continue
        delta = deltas.get(name)
        changed = weight if delta is None else (weight.float() + delta.float()).to(weight.dtype)
        merged[name.replace(".base_layer.", ".")] = changed if part is weight else changed.cpu()
    return merged
