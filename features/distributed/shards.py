"""Spreads a model over the ranks with FSDP2: every rank keeps a part of each layer.

Embeddings, head and LoRA adapters stay unsharded on every rank. If layers are trained, FSDP2 gathers their weights when
they are needed, and sums and shares out their gradients; each rank has the optimizer's state of its own parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from ...core.errors import ConfigError


def is_sharded() -> bool:
    """Return whether the launcher's configuration asks for a sharded base model."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard the decoder layers of `model` (on the CPU, perhaps with adapters), and move everything to `device`."""
    plugin = FullyShardedDataParallelPlugin()
    check(plugin)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(bare, PreTrainedModel)
    layers, body = _layers(bare), bare.base_model
    spread = {
        p for layer in layers for p in layer.parameters() if not (isinstance(model, PeftModel) and p.requires_grad)
    }
    rest = {p for p in body.parameters() if p not in spread}
    for layer in layers:
        shared = fully_shard(layer, mesh=mesh, ignored_params=rest, reshard_after_forward=plugin.reshard_after_forward)
        # Gradients are summed, not averaged. Gloo knows no sum that is scaled on the way.
        shared.set_gradient_divide_factor(1.0)
        shared.set_force_sum_reduction_for_comms(True)
    # The root: it starts gathering the next layer while one is computed.
    fully_shard(body, mesh=mesh, ignored_params=rest)
    for tensor in (*bare.parameters(), *bare.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


def gathered(weight: Tensor) -> Tensor:
    """Gather a sharded weight, which needs every rank; return any other weight as it is."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def scattered(weight: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a weight, or the weight itself if `like` is not sharded. Rank 0 has the values."""
    value = (
        torch.empty(weight.shape, dtype=weight.dtype, device=like.device) if weight.is_meta else weight.to(like.device)
    )
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements)
    dist.broadcast(value, src=0)
    return value


def local(weight: Tensor) -> Tensor:
    """Return the part of a weight that is on this rank."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Clip the norm of all gradients together, of sharded and of unsharded parameters; return it as it was."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    spread, unsharded = ([g for g in gradients if isinstance(g, DTensor) is one] for one in (True, False))
    squares = torch.stack([gathered(torch.nn.utils.get_total_norm(part)) for part in (spread, unsharded) if part]) ** 2
    norm = squares.sum().sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for gradient in gradients:
        local(gradient).mul_(factor)
    return float(norm)


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
