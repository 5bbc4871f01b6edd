"""Runs one trainer in several processes (ranks). Rank 0 leads; the others repeat its work.

Weights and optimizer are the same on every rank, or sharded over them. The samples of a step are shared out, and
gradients are summed before anybody uses them, so a step's update does not depend on the number of ranks.
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
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.errors import ConfigError, LightningError
from ...trainer.rows.prefix_tree import MicroBatch, TreeCost
from ...trainer.step.processes import Pass, Processes
from . import shards
from .shares import share_out

T = TypeVar("T")

SUPPORTED = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP}
# How long the others may wait for rank 0 between two steps. The end of a process is noticed at once.
IDLE = timedelta(days=365)
# How far one rank may be behind another within a step.
STEP = timedelta(minutes=30)


class RankLost(LightningError):
    """Another process of this trainer is gone, so no step can be finished. The last finished step is kept."""


def launched() -> bool:
    """Return whether a launcher (torchrun, `accelerate launch`) asks for several processes, or for a sharded model."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or shards.is_sharded()


class Ranks(Processes):
    """This process among the ranks that a launcher started. `prepare` makes them know each other."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 1
        self._calling = False
        self._joined = False

    def prepare(self, accelerator: Accelerator, model: Any) -> Any:
        """Join the other ranks, and give all of them the trained weights of rank 0.

        The model is not wrapped: DDP would average gradients, which are summed here, and the model is called part by
        part.
        """
        self._join(accelerator)
        if self.sharded:
            shards.shard(model, accelerator.device)
        else:
            model = accelerator.prepare_model(model, evaluation_mode=True)
        if self.size > 1:
            for parameter in (p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)):
                dist.broadcast(parameter.data, src=0)
        return model

    def _join(self, accelerator: Accelerator) -> None:
        if self._joined:
            return
        self._joined = True
        self.sharded = shards.is_sharded()
        if accelerator.num_processes == 1 and not self.sharded:
            return
        if accelerator.distributed_type not in SUPPORTED:
            raise ConfigError(f"the launcher's distributed_type: {accelerator.distributed_type.value} is not supported")
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        if self.size > 1:
            # On the CPU whatever the device: objects travel, and a lost process shows as a closed connection.
            self._idle = dist.new_group(backend="gloo", timeout=IDLE)
            self._step = dist.new_group(backend="gloo", timeout=STEP)

    @contextmanager
    def together(self, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Have all other ranks call the trainer's `method` while rank 0 runs the block. They just run the block."""
        with self.turn, _lost_ranks_named():
            tells = self.rank == 0 and self.size > 1 and not self._calling
            if tells:
                self._tell((method, args, kwargs))
                self._calling = True
            try:
                yield
            finally:
                self._calling = self._calling and not tells

    def follow(self, trainer: object) -> None:
        """Repeat the work of rank 0 until it ends. Only rank 0 acts on Ctrl-C."""
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
        """Let the other ranks end. Otherwise they take the end of rank 0 for a failure."""
        if self.size > 1:
            with self.turn, _lost_ranks_named():
                self._tell(None)
            dist.destroy_process_group()

    def passes(self, parts: Sequence[MicroBatch], cost: TreeCost) -> list[Pass]:
        """Return this rank's share of the passes; as many as any other rank's if the base model is sharded."""
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
        """Sum every rank's gradients in float32, in one message. A parameter without any gradient gets none.

        Those of sharded parameters are summed already: FSDP2 does it in the backward pass.
        """
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

    def gather(self, weight: Tensor) -> Tensor:
        return shards.gathered(weight)

    def part(self, weight: Tensor, like: Tensor) -> Tensor:
        return shards.scattered(weight, like) if self.sharded else weight

    def local(self, weight: Tensor) -> Tensor:
        return shards.local(weight)

    def clip(self, accelerator: Accelerator, parameters: Sequence[nn.Parameter], limit: float) -> float:
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            return shards.clip(parameters, limit)
        return super().clip(accelerator, parameters, limit)

    def _tell(self, what: object) -> None:
        dist.broadcast_object_list([what], src=0, group=self._idle)


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
