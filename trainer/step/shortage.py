"""Handles memory that runs out: a pass is undone and halved. A sample that does not fit alone is left out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..rows.prefix_tree import MicroBatch, halves
from ..weights import TrainedWeights
from .processes import Pass
from .step_metrics import StepMetrics, some_rollouts

log = logging.getLogger(__name__)


def make_what_fits(
    passes: Sequence[Pass], make: Callable[[Pass, StepMetrics], None], trained: TrainedWeights, metrics: StepMetrics
) -> StepMetrics:
    """Make passes up to one whose loss is not finite, in halves where memory runs out; returns their metrics.

    Where gradients are not set aside, a pass that fails has added to them, and all passes begin anew.
    """
    todo, done = list(passes)[::-1], list[Pass]()
    while todo and metrics.fault is None:
        one, tried = todo.pop(), replace(metrics)
        undoable = trained.undoable(one.micro_batch.adapter)
        if fits(partial(make, one, tried), undoable):
            metrics = tried
            done.append(one)
            continue
        todo += [Pass(half, one.counts) for half in smaller(one.micro_batch, metrics)]
        if not undoable:
            for parameter in trained.parameters():
                parameter.grad = None
            todo, done, metrics = todo + done, [], metrics.begun_anew()
    return metrics


def fits(work: Callable[[], None], parameters: Sequence[nn.Parameter]) -> bool:
    """Do `work`, and return whether memory sufficed. If not, nothing was added to the gradients of `parameters`."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        work()
        done = True
    except torch.OutOfMemoryError as error:
        done = False
        log.warning("memory ran out in a pass: %s", str(error).splitlines()[0])
    for parameter, gradient in zip(parameters, before, strict=True):
        if not done or parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad += gradient
    if not done:
        gc.collect()
        give_back()  # what the allocator keeps is in pieces of the wrong sizes
    return done


def give_back() -> None:
    """Give the memory that torch keeps for later back to the GPU: a vLLM that starts again needs room beside us."""
    torch.cuda.empty_cache()


def smaller(batch: MicroBatch, metrics: StepMetrics) -> list[MicroBatch]:
    """Return the halves of a pass that did not fit, and count it; of a single sample nothing is left."""
    if len(batch.samples) > 1:
        found = list(halves(batch))
        metrics.passes_halved += 1
        metrics.fitting = min(metrics.fitting, max(len(half.tree) for half in found))
        return found
    (sample,) = batch.samples
    metrics.rows_out_of_memory += 1
    metrics.too_large = (*metrics.too_large, sample.rollout_id)
    return []


def too_large(metrics: StepMetrics) -> str | None:
    """Return in words which rollouts have rows that did not fit."""
    if not metrics.too_large:
        return None
    rows = f"{metrics.rows_out_of_memory} row{'s' if metrics.rows_out_of_memory != 1 else ''}"
    return f"{rows} of {some_rollouts(metrics.too_large)}: too large for the memory; lower trainer.max_sample_tokens"
