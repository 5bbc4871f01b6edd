"""The processes (ranks) of one trainer. Rank 0 leads: it alone talks to the store and to vLLM; the others go along.

The adapter, its optimizer and what comes of them are the same on every rank; the samples of a step are shared out, and
gradients are summed before anybody uses them. So a step's update does not depend on how many ranks there are.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from peft import PeftModel
from torch import Tensor, nn

from ...proxy.errors import ConfigError, LightningError
from . import shards

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

SUPPORTED = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP}
# Between two steps the others wait for as long as rank 0 has nothing to do. A process that ends is noticed at once.
IDLE = timedelta(days=365)
# Within a step, nobody should be this far behind.
STEP = timedelta(minutes=30)


class RankLost(LightningError):
    """Another process of this trainer is gone, so no step can be finished; the last one that was is kept."""


def leads() -> bool:
    """Whether this process is rank 0, or the only one; as the launcher says, before there is a process group."""
    return int(os.environ.get("RANK", "0")) == 0


def prepare(accelerator: Accelerator, model: PeftModel, optimizer: Any) -> tuple[Any, Any, Ranks]:
    """The model in its place and the optimizer, as `accelerator.prepare` returns them; and the ranks.

    With several ranks the model is not wrapped: DDP and FSDP would average what we sum, and it is called by parts.
    """
    sharded = shards.asked_for()
    if accelerator.num_processes == 1 and not sharded:
        return *accelerator.prepare(model, optimizer), Ranks(0, 1)
    if accelerator.distributed_type not in SUPPORTED:
        raise ConfigError(f"the launcher's distributed_type: {accelerator.distributed_type.value} is not supported")
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, sharded=sharded)
    if sharded:
        shards.shard(model.get_base_model(), accelerator.device)
    else:
        model = accelerator.prepare_model(model, evaluation_mode=True)
    ranks.copy_from_first(p for p in model.parameters() if p.requires_grad)
    return model, accelerator.prepare_optimizer(optimizer), ranks


def alone(accelerator: Accelerator) -> Any:
    """The accelerator as it would be without other ranks: what is gathered or summed over all is one's own."""
    return accelerator if accelerator.num_processes == 1 else _Alone(accelerator)


class _Alone:
    num_processes = 1

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        return tensor


class Ranks:
    """This process among the ranks; does nothing where it is alone.

    `sharded`: the base model is spread over the ranks, which then must do the same forward and backward passes.
    """

    def __init__(self, rank: int, size: int, *, sharded: bool = False) -> None:
        self.rank, self.size, self.sharded = rank, size, sharded
        self._turn = threading.RLock()
        self._calling = False
        # On the CPU whatever the device: objects travel, and a lost process shows as a closed connection.
        self._idle = dist.new_group(backend="gloo", timeout=IDLE) if size > 1 else None
        self._step = dist.new_group(backend="gloo", timeout=STEP) if size > 1 else None

    @property
    def alone(self) -> bool:
        return self.size == 1

    @contextmanager
    def together(self, method: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """On rank 0, have the others call the trainer's `method` while the block runs; on them, just run it."""
        with self._turn, _lost_ranks_named():
            tells = self.rank == 0 and not self.alone and not self._calling
            if tells:
                self._tell((method, args, kwargs))
                self._calling = True
            try:
                yield
            finally:
                self._calling = self._calling and not tells

    def follow(self, trainer: object) -> None:
        """Do what rank 0 does until it says that it is over. Ctrl-C is rank 0's to act on; we end with it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while (call := self._hear()) is not None:
            method, args, kwargs = call
            getattr(trainer, method)(*args, **kwargs)
        dist.destroy_process_group()

    def end(self) -> None:
        """On rank 0: let the others go. Without it they take our end for a failure."""
        if not self.alone:
            with self._turn, _lost_ranks_named():
                self._tell(None)
            dist.destroy_process_group()

    def gathered(self, value: T) -> list[T]:
        """Every rank's `value`, by rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._step)
        return values

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every rank's gradients become the sum over ranks, in float32; where none has any, there is none."""
        if self.alone:
            return
        parameters = list(parameters)
        found = self.gathered([p.grad is not None for p in parameters])
        parameters = [p for p, *has in zip(parameters, *found, strict=True) if any(has)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for p, whole in zip(parameters, self._summed(gradients), strict=True):
            p.grad = whole.to(p.dtype)

    @torch.no_grad()
    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Every rank's tensors become those of rank 0."""
        if not self.alone:
            for tensor in tensors:
                dist.broadcast(tensor.data, src=0)

    def _summed(self, tensors: list[Tensor]) -> list[Tensor]:
        """By one message, however many there are."""
        flat = torch.cat([tensor.float().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]

    def _tell(self, what: object) -> None:
        dist.broadcast_object_list([what], src=0, group=self._idle)

    def _hear(self) -> Any:
        with _lost_ranks_named():
            heard = [None]
            dist.broadcast_object_list(heard, src=0, group=self._idle)
        return heard[0]


def on_every_rank(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A trainer's method that rank 0 calls, and that all ranks run at the same time with the same arguments."""

    @functools.wraps(method)
    def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.ranks.together(method.__name__, *args, **kwargs):
            return method(self, *args, **kwargs)

    return run


def on_every_shard(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """As `on_every_rank` where the base model is sharded over the ranks; else rank 0 can do it by itself."""
    everywhere = on_every_rank(method)

    @functools.wraps(method)
    def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return (everywhere if self.ranks.sharded else method)(self, *args, **kwargs)

    return run


@contextmanager
def _lost_ranks_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RankLost(
            "another process of the trainer has ended, or cannot be reached: its own error says why; the last finished "
            f"step is kept, start the trainer again to go on from it ({str(error).splitlines()[0][:200]})"
        ) from error
