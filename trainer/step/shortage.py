"""Handles out-of-memory errors: passes are halved, and a sample that does not fit alone is left out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..rows.prefix_tree import halves
from .processes import Pass
from .step_metrics import Numbers

log = logging.getLogger(__name__)


def make_what_fits(
    passes: Sequence[Pass], make: Callable[[Pass], Numbers], parameters: Sequence[nn.Parameter]
) -> Numbers:
    """Run the passes, but stop at a loss that is not finite. Return their numbers.

    A pass that fails may have added to the gradients. So when memory runs out, all passes run again: the failed one as
    two halves, and the others in parts that are no larger. A single sample that does not fit is left out. An adapter's
    largest passes come first, so that little work is lost.
    """
    shortage, todo = Numbers(), list(passes)
    while True:
        todo.sort(key=lambda one: (one.micro_batch.adapter, -len(one.micro_batch.tree)))
        found, failed = Numbers(), None
        for one in todo:
            try:
                found.add(make(one))
            except torch.OutOfMemoryError as error:
                log.warning("memory ran out in a pass: %s", str(error).splitlines()[0])
                failed = one
            if failed or found.fault:
                break
        if failed is None:
            found.add(shortage)
            return found
        for parameter in parameters:
            parameter.grad = None
        gc.collect()
        give_back()  # what the allocator keeps is in pieces of the wrong sizes
        halved = _halved(failed, shortage)
        todo = halved + [part for one in todo if one is not failed for part in _fitting(one, shortage)]


def _fitting(one: Pass, shortage: Numbers) -> list[Pass]:
    """The pass in parts that have no more nodes than fit."""
    if len(one.micro_batch.tree) <= shortage.fitting or len(one.micro_batch.samples) == 1:
        return [one]
    return [part for half in _halved(one, shortage) for part in _fitting(half, shortage)]


def _halved(one: Pass, shortage: Numbers) -> list[Pass]:
    """Return the halves of a pass that does not fit, or nothing for a single sample. Count it in `shortage`."""
    samples = one.micro_batch.samples
    if len(samples) == 1:
        shortage.too_large += (samples[0].rollout_id,)
        return []
    found = halves(one.micro_batch)
    shortage.sums["passes_halved"] += 1
    shortage.fitting = min(shortage.fitting, max(len(half.tree) for half in found))
    return [Pass(half, one.counts) for half in found]


def give_back() -> None:
    """Free the GPU memory that torch has cached: a vLLM that restarts needs room too."""
    torch.cuda.empty_cache()
