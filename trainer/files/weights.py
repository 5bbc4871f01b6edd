"""Writes the policy's weights for vLLM: as LoRA adapters, or as a full model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .checkpoint import atomic_directory

MARKER = "COMPLETE"


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapters in PEFT's format. `directory` appears atomically, with a marker file.

    The adapter `default` is in `directory` itself, each other one in a sub-directory of its name.
    """
    with atomic_directory(directory) as temporary:
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
    gather: Callable[[Tensor], Tensor] = lambda weight: weight,
    writes: bool = True,
) -> None:
    """Write base + LoRA as an ordinary checkpoint, atomically. The weights in memory do not change.

    If the base is sharded, every process calls this with a `gather` that unshards a weight, and only one `writes`.
    """
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    _write_atomically(base, _merged_state(base, gather, keep=writes), tokenizer, directory, writes=writes)


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    dtype: torch.dtype,
    *,
    gather: Callable[[Tensor], Tensor],
    writes: bool,
) -> None:
    """Write a full model in `dtype` as an ordinary checkpoint. Otherwise like `save_merged`.

    A weight that two modules share is written once, as transformers does.
    """
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    state = {}
    for name, part in model.state_dict().items():
        if name not in again:
            weight = gather(part)
            if writes:
                weight = weight.to(dtype) if weight.is_floating_point() else weight
                state[name] = weight if weight is part else weight.cpu()
    _write_atomically(model, state, tokenizer, directory, writes=writes, dtype=dtype)


def _write_atomically(
    model: PreTrainedModel,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    writes: bool,
    dtype: torch.dtype | None = None,
) -> None:
    if not writes:
        return
    with atomic_directory(directory) as temporary:
        _write_model(model, state, tokenizer, temporary)
        if dtype is not None:
            _note_dtype(temporary / "config.json", dtype)
        (temporary / MARKER).touch()


def _note_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write which dtype the weights are in: transformers writes that of the model in memory."""
    about = json.loads(config.read_text())
    config.write_text(json.dumps(about | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")


def _write_model(
    base: PreTrainedModel, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    base.save_pretrained(str(directory), state_dict=state)
    tokenizer.save_pretrained(str(directory))


@torch.no_grad()
def _merged_state(base: PreTrainedModel, gather: Callable[[Tensor], Tensor], *, keep: bool) -> dict[str, Tensor]:
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
        weight = gather(part)
        if not keep:
            continue
        delta = deltas.get(name)
        changed = weight if delta is None else (weight.float() + delta.float()).to(weight.dtype)
        merged[name.replace(".base_layer.", ".")] = changed if part is weight else changed.cpu()
    return merged
