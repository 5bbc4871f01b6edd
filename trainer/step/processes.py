"""The processes that compute a step together. The core has one; `features/distributed/` has several."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

from accelerate import PartialState
from torch import nn

from ...core.errors import ConfigError
from ..rows.prefix_tree import MicroBatch, TreeCost

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Pass(NamedTuple):
    """A forward and backward pass over a micro-batch.

    `counts` is false if the pass is made only because another process needs this process's part of the model.
    """

    micro_batch: MicroBatch
    counts: bool


class Processes:
    """A single process. For several, `distributed.ranks.Ranks` overrides these methods.

    Process 0 leads: only it talks to the store and to vLLM. If the model is `sharded`, all processes must make the same
    number of passes.
    """

    rank = 0
    sharded = False

    def __init__(self) -> None:
        self.turn = threading.RLock()  # one thread at a time uses the model

    def prepare(self, state: PartialState, model: Any) -> Any:
        """Move the model to this process's device."""
        return model.to(state.device)

    def together(self, method: str, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Have the other processes call the trainer's `method` while the block runs."""
        return nullcontext()

    def passes(self, parts: Sequence[MicroBatch], cost: TreeCost) -> list[Pass]:
        """Return the passes of a step that this process makes."""
        return [Pass(part, True) for part in parts]

    def gathered(self, value: T) -> list[T]:
        """Return the `value` of every process, in order of rank."""
        return [value]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over all processes, in each of them."""

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        """Clip the joint norm of these parameters' gradients. Return the norm before clipping."""
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    def follow(self, trainer: object) -> None:
        """Repeat what process 0 does until it ends. Raises ConfigError without the feature `distributed`."""
        raise ConfigError("this process is one of several, which needs the feature `distributed`")

    def end(self) -> None:
        """Let the other processes end."""


def on_every_process(method: F, *, only_if_sharded: bool = False) -> F:
    """Run a trainer's method in all processes at once, with the arguments that process 0 passes."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        processes: Processes = self.processes
        with processes.turn, ExitStack() as stack:
            if processes.sharded or not only_if_sharded:
                stack.enter_context(processes.together(method.__name__, *args, **kwargs))
            return method(self, *args, **kwargs)

    return cast(F, run)


def on_every_shard(method: F) -> F:
    """Like `on_every_process` if the base model is sharded; otherwise process 0 runs the method by itself."""
    return on_every_process(method, only_if_sharded=True)
