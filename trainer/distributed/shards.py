"""Spreads the frozen base model over the ranks with FSDP2: every rank keeps a part of each layer.

The adapter is small and stays whole on every rank, and so do embeddings and head. So FSDP2 has no gradient to reduce
and no optimizer state to shard: it only gathers a layer's weights while they are needed.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...proxy.errors import ConfigError


def asked_for() -> bool:
    """Return whether the launcher's configuration asks for a sharded base model."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Shard the decoder layers of `model` (the bare causal LM, on the CPU), and move everything to `device`."""
    plugin = FullyShardedDataParallelPlugin()
    check(plugin)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    body = model.base_model
    layers = _layers(model)
    frozen = {p for layer in layers for p in layer.parameters() if not p.requires_grad}
    whole = {p for p in body.parameters() if p not in frozen}
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=whole, reshard_after_forward=plugin.reshard_after_forward)
    # The root: it starts gathering the next layer while one is computed.
    fully_shard(body, mesh=mesh, ignored_params=whole)
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


def gathered(weight: Tensor) -> Tensor:
    """Return a sharded weight as a whole, which needs every rank; return any other weight as it is."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    layers = [module for module in model.base_model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"policy.model: {type(model).__name__} names no layers to shard; run it without FSDP")
    return layers


def check(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise ConfigError if the launcher's configuration asks for something that is not supported."""
    problems = {
        "fsdp_version: only 2 is supported": plugin.fsdp_version != 2,
        "fsdp_offload_params: must be false": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_cpu_ram_efficient_loading: must be false": plugin.cpu_ram_efficient_loading,
        "fsdp_activation_checkpointing: must be false; on a GPU the trainer does it anyway": (
            plugin.activation_checkpointing
        ),
    }
    if wrong := [problem for problem, is_so in problems.items() if is_so]:
        raise ConfigError(f"the launcher's configuration, fsdp_config.{wrong[0]}")
