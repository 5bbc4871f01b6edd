"""Handles memory that runs out: a pass is undone and halved. A sample that does not fit alone is left out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..rows.prefix_tree import halves
from ..weights import TrainedWeights
from .processes import Pass
from .step_metrics import Numbers

log = logging.getLogger(__name__)


def make_what_fits(passes: Sequence[Pass], make: Callable[[Pass], Numbers], trained: TrainedWeights) -> Numbers:
    """Make passes up to one whose loss is not finite, in halves where memory runs out; returns their numbers.

    Where gradients are not set aside, a pass that fails has added to them, and all passes begin anew.
    """
    shortage, todo, done = Numbers(), list(passes)[::-1], list[tuple[Pass, Numbers]]()
    while todo and not (done and done[-1][1].fault):
        one = todo.pop()
        undoable = trained.undoable(one.micro_batch.adapter)
        numbers = _attempt(one, make, undoable)
        if numbers is not None:
            done.append((one, numbers))
            continue
        todo += _smaller(one, shortage)
        if not undoable:
            for parameter in trained.parameters():
                parameter.grad = None
            todo, done = todo + [made for made, _ in done], []
    for _, numbers in done:
        shortage.add(numbers)
    return shortage


def _attempt(one: Pass, make: Callable[[Pass], Numbers], parameters: Sequence[nn.Parameter]) -> Numbers | None:
    """Make a pass. None if memory ran out; nothing was added to the gradients of `parameters` then."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    numbers = None
    try:
        numbers = make(one)
    except torch.OutOfMemoryError as error:
        log.warning("memory ran out in a pass: %s", str(error).splitlines()[0])
    for parameter, gradient in zip(parameters, before, strict=True):
        if numbers is None or parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad += gradient
    if numbers is None:
        gc.collect()
        give_back()  # what the allocator keeps is in pieces of the wrong sizes
    return numbers


def give_back() -> None:
    """Give the memory that torch keeps for later back to the GPU: a vLLM that starts again needs room beside us."""
    torch.cuda.empty_cache()


def _smaller(one: Pass, shortage: Numbers) -> list[Pass]:
    """Return the halves of a pass that did not fit, and note it; of a single sample nothing is left."""
    samples = one.micro_batch.samples
    if len(samples) == 1:
        shortage.sums["rows_out_of_memory"] += 1
        shortage.too_large += (samples[0].rollout_id,)
        return []
    found = halves(one.micro_batch)
    shortage.sums["passes_halved"] += 1
    shortage.fitting = min(shortage.fitting, max(len(half.tree) for half in found))
    return [Pass(half, one.counts) for half in found]
