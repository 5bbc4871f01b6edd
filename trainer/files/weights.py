"""The policy's weights as files that vLLM loads: a LoRA adapter, or the whole model with the adapter merged in."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed.shards import gathered
from .checkpoint import whole_directory

MARKER = "COMPLETE"


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapters in PEFT's format; `directory` appears whole, with a marker file, or not at all.

    `default` is in it itself, each other adapter in a directory of its name.
    """
    with whole_directory(directory) as temporary:
        model.save_pretrained(str(temporary))
        (temporary / MARKER).touch()


def save_merged(model: PeftModel, tokenizer: PreTrainedTokenizerBase, directory: Path, *, writes: bool = True) -> None:
    """Write base + LoRA as an ordinary checkpoint, whole or not at all. The weights in memory stay as they are.

    Where the base is sharded every rank calls this, and one `writes`.
    """
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    state = merged_state(base, keep=writes)
    if not writes:
        return
    with whole_directory(directory) as temporary:
        base.save_pretrained(str(temporary), state_dict=state)
        tokenizer.save_pretrained(str(temporary))
        (temporary / MARKER).touch()


@torch.no_grad()
def merged_state(base: PreTrainedModel, *, keep: bool = True) -> dict[str, Tensor]:
    """The state dict that `base` would have without PEFT, the weights under LoRA layers replaced by W + BA·scale.

    `keep=False`: help the other ranks to gather theirs, and return nothing.
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
        weight = gathered(part)
        if not keep:
            continue
        delta = deltas.get(name)
        whole = weight if delta is None else (weight.float() + delta.float()).to(weight.dtype)
        merged[name.replace(".base_layer.", ".")] = whole if part is weight else whole.cpu()
    return merged
