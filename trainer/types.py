"""What the trainer works on: samples (training rows) and what a step reports. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..proxy.config.policy import DEFAULT_ADAPTER


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of one rollout; every list has the length of `token_ids`.

    `mask[i]` is 1 where the policy sampled `token_ids[i]`, 0 for context; there `logprobs` and `advantages` are 0.0.
    `temperatures[i]` is the sampling temperature of the call that token i belongs to (1.0 for context).
    `adapter`: whose gradient the row is; it sampled every answer in it.
    """

    rollout_id: str
    task_id: str
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    temperatures: tuple[float, ...]
    call_ids: tuple[str, ...] = ()
    adapter: str = DEFAULT_ADAPTER

    def __post_init__(self) -> None:
        lengths = {len(x) for x in (self.token_ids, self.mask, self.logprobs, self.advantages, self.temperatures)}
        if len(lengths) != 1:
            raise ValueError(f"sample of {self.rollout_id}: token ids, mask, logprobs, advantages differ in length")
        if self.mask and self.mask[0]:
            raise ValueError(f"sample of {self.rollout_id}: its first token has no context to be predicted from")

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on: the samples, and how they came about (counts for the metrics).

    `compared`: the rollouts whose rewards were looked at, those of groups that teach nothing included; the loss is
    averaged over them, so that a step with little to learn from is a small step. 0: the rollouts of the samples.
    `compared_by_adapter`: those of them in which the adapter's agents took part, where adapters are told apart.
    `tasks`: mean, spread and number of the rewards by task.
    """

    step: int
    samples: tuple[Sample, ...]
    rollout_ids: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    compared_by_adapter: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
