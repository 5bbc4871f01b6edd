"""Runs one trainer in several processes (ranks). Rank 0 leads; the others make the same calls.

The samples of a step are divided among ranks, and gradients are summed before use, so a step's update does not depend
on the number of ranks. With a sharded model (FSDP2), every rank has a part of each layer, of its gradients and of its
optimizer state. Embeddings, head and LoRA adapters stay unsharded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...core.errors import ConfigError, LightningError
from ...trainer.rows.prefix_tree import MicroBatch, TreeCost, halves
from ...trainer.step.processes import Pass, Processes
from ...trainer.weights import local

T = TypeVar("T")
SUPPORTED = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
# How long the others may wait for rank 0 between two steps. The end of a process is noticed at once.
IDLE = timedelta(days=365)
# How far one rank may be behind another within a step.
STEP = timedelta(minutes=30)
Shares = list[list[MicroBatch]]


class RankLost(LightningError):
    """Another process of this trainer is gone, so no step can be finished. The last finished step is kept."""


def launched() -> bool:
    """Return whether a launcher (torchrun, `accelerate launch`) asked for several processes, or for a sharded model."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or is_sharded()


class Ranks(Processes):
    """This process among the ranks that a launcher started. `prepare` connects them."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 1
        self._calling = False
        self._joined = False

    def prepare(self, state: PartialState, model: Any) -> Any:
        """Join the other ranks. Return the model on its device, with rank 0's values of unsharded trained weights."""
        self._join(state)
        if self.sharded:
            shard(model, state.device)
        else:
            model = super().prepare(state, model)
        if self.size > 1:
            for parameter in (p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)):
                dist.broadcast(parameter.data, src=0)
        return model

    def _join(self, state: PartialState) -> None:
        if self._joined:
            return
        self._joined = True
        self.sharded = is_sharded()
        if state.num_processes == 1 and not self.sharded:
            return
        if state.distributed_type not in SUPPORTED:
            raise ConfigError(f"the launcher's distributed_type {state.distributed_type.value} is not supported")
        self.rank, self.size = state.process_index, state.num_processes
        if self.size > 1:
            # On the CPU whatever the device: objects travel, and a lost process shows as a closed connection.
            self._idle = dist.new_group(backend="gloo", timeout=IDLE)
            self._step = dist.new_group(backend="gloo", timeout=STEP)

    @contextmanager
    def together(self, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Run the block. If it is rank 0's outermost one, the other ranks call the trainer's `method` meanwhile."""
        with self.turn, _lost_ranks_named():
            tells = self.rank == 0 and self.size > 1 and not self._calling
            if tells:
                dist.broadcast_object_list([(method, args, kwargs)], src=0, group=self._idle)
                self._calling = True
            try:
                yield
            finally:
                self._calling = self._calling and not tells

    def follow(self, trainer: object) -> None:
        """Make the same calls as rank 0 until rank 0 calls `end`. SIGINT and SIGTERM are ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            heard: list[Any] = [None]
            with _lost_ranks_named():
                dist.broadcast_object_list(heard, src=0, group=self._idle)
            if heard[0] is None:
                break
            method, args, kwargs = heard[0]
            getattr(trainer, method)(*args, **kwargs)
        dist.destroy_process_group()

    def end(self) -> None:
        """Let the other ranks end. Otherwise they would take the end of rank 0 for a failure."""
        if self.size > 1:
            with self.turn, _lost_ranks_named():
                dist.broadcast_object_list([None], src=0, group=self._idle)
            dist.destroy_process_group()

    def passes(self, parts: Sequence[MicroBatch], cost: TreeCost) -> list[Pass]:
        """Return this rank's share of the passes. If the base model is sharded, all ranks get the same number."""
        shares = share_out(parts, cost, self.size)
        mine = [Pass(part, True) for part in shares[self.rank]]
        if self.sharded and parts:
            smallest = min(parts, key=lambda part: len(part.tree))
            mine += [Pass(smallest, False)] * (max(map(len, shares)) - len(mine))
        return mine

    def gathered(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._step)
        return values

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the ranks' unsharded gradients in float32. FSDP2 has already summed the sharded ones."""
        if self.size == 1:
            return
        parameters = [p for p in parameters if not isinstance(p, DTensor)]
        found = self.gathered([p.grad is not None for p in parameters])
        parameters = [p for p, *has in zip(parameters, *found, strict=True) if any(has)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.float().flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = piece.view_as(p).to(p.dtype)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            return clip(parameters, limit)
        return super().clip(parameters, limit)


@contextmanager
def _lost_ranks_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RankLost(
            "another process of the trainer has ended, or cannot be reached; its own output says why. The last "
            f"finished step is kept: start the trainer again to resume from it ({str(error).splitlines()[0][:200]})"
        ) from error


def is_sharded() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard the decoder layers of `model`, and move it all to `device`. Raises ConfigError if this is unsupported."""
    plugin = FullyShardedDataParallelPlugin()
    check(plugin)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(bare, PreTrainedModel)
    body, names = bare.base_model, set(bare._no_split_modules or ())
    layers = [module for module in body.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"policy.model: {type(bare).__name__} names no layers to shard; run it without FSDP")
    spread = {
        p for layer in layers for p in layer.parameters() if not (isinstance(model, PeftModel) and p.requires_grad)
    }
    rest = {p for p in body.parameters() if p not in spread}
    for layer in layers:
        shared = fully_shard(layer, mesh=mesh, ignored_params=rest, reshard_after_forward=plugin.reshard_after_forward)
        # Gradients are summed, not averaged. Gloo does not support scaled sums.
        shared.set_gradient_divide_factor(1.0)
        shared.set_force_sum_reduction_for_comms(True)
    # The root: it starts gathering the next layer while one is computed.
    fully_shard(body, mesh=mesh, ignored_params=rest)
    for tensor in (*bare.parameters(), *bare.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Clip the norm of all gradients, sharded and unsharded ones together. Return the norm before clipping."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    spread, unsharded = ([g for g in gradients if isinstance(g, DTensor) is one] for one in (True, False))
    norms = [torch.nn.utils.get_total_norm(part) for part in (spread, unsharded) if part]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for gradient in gradients:
        local(gradient).mul_(factor)
    return float(norm)


def check(plugin: FullyShardedDataParallelPlugin) -> None:
    problems = {
        "fsdp_version must be 2": plugin.fsdp_version != 2,
        "fsdp_offload_params must be false": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_cpu_ram_efficient_loading must be false": plugin.cpu_ram_efficient_loading,
        "fsdp_activation_checkpointing must be false; trainer.gradient_checkpointing replaces it": (
            plugin.activation_checkpointing
        ),
    }
    if wrong := [problem for problem, is_so in problems.items() if is_so]:
        raise ConfigError(f"the launcher's fsdp_config: {wrong[0]}")


def share_out(parts: Sequence[MicroBatch], cost: TreeCost, ranks: int) -> Shares:
    """Return micro-batches by rank. The slowest rank's largest one is halved as long as that shortens the step."""
    if ranks == 1:
        return [list(parts)]
    shares = _longest_first(parts, cost, ranks)
    while parts:
        slowest = max(shares, key=lambda share: _work(share, cost))
        largest = max(slowest, key=lambda part: cost(part.tree))
        parts = [part for part in parts if part is not largest] + halves(largest)
        finer = _longest_first(parts, cost, ranks)
        if max(_work(share, cost) for share in finer) >= _work(slowest, cost):
            break
        shares = finer
    return shares


def _longest_first(parts: Sequence[MicroBatch], cost: TreeCost, ranks: int) -> Shares:
    """Assign each part, longest first, to the rank with the least work: within 4/3 of the optimum (Graham 1969)."""
    shares: Shares = [[] for _ in range(ranks)]
    for part in sorted(parts, key=lambda part: cost(part.tree), reverse=True):
        min(shares, key=lambda share: _work(share, cost)).append(part)
    return shares


def _work(share: Sequence[MicroBatch], cost: TreeCost) -> float:
    return sum(cost(part.tree) for part in share)
