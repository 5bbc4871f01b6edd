"""The state of a trainer in a checkpoint: weights, optimizer, schedule, random state."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..weights import Trained
from .losses import EntropyBonus

State = dict[str, Any]
SHARDED = ("adapters", "optimizer")


class Resumable(Protocol):
    """A trainer of transformers that can resume from a state: `LightningTrainer`."""

    state: Any
    optimizer: Any
    lr_scheduler: Any
    weight_sets: Trained
    entropy: EntropyBonus


def state_of(trainer: Resumable) -> State:
    """Return the state from which a trainer can resume exactly here."""
    return {
        "step": trainer.state.global_step,
        "adapters": trainer.weight_sets.all_weights(),
        "optimizer": trainer.weight_sets.optimizer_state(trainer.optimizer),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "entropy": trainer.entropy.state(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all(),
    }


def restore(trainer: Resumable, state: State, rate: float) -> None:
    """Give a trainer the state and the rate; without the optimizer's state, its moments and the schedule begin anew."""
    trainer.weight_sets.set(state["adapters"])
    if "optimizer" in state:
        trainer.weight_sets.load_optimizer_state(trainer.optimizer, state["optimizer"])
        trainer.lr_scheduler.load_state_dict(state["scheduler"])
    else:
        trainer.optimizer.state.clear()
        trainer.lr_scheduler.last_epoch = 0
    _set_learning_rate(trainer, rate)
    trainer.entropy.load(state.get("entropy", {}))
    _set_random_state(state)
    trainer.state.global_step = state["step"]


def without_values(state: State) -> State:
    """Return a state for processes that get their parts of sharded weights and moments from process 0."""
    large = {key: state[key] for key in SHARDED if key in state}
    return state | _on_meta(large)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta") if value.dim() else value
    if isinstance(value, dict):
        return {key: _on_meta(inner) for key, inner in value.items()}
    return [_on_meta(inner) for inner in value] if isinstance(value, list) else value


def _set_random_state(state: State) -> None:
    """Devices that were not there when the state was written keep the random state that they have."""
    torch.set_rng_state(state["rng"])
    for device, rng in zip(range(torch.cuda.device_count()), state.get("cuda_rng", ()), strict=False):
        torch.cuda.set_rng_state(rng, device)


def _set_learning_rate(trainer: Resumable, rate: float) -> None:
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    rates = [rate] * len(optimizer.param_groups)
    schedule.base_lrs = rates
    for group, rate, factor in zip(optimizer.param_groups, rates, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(schedule.last_epoch)
