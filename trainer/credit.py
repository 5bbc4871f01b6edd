"""Credit over calls: from a rollout's rewards to the return of each call. One small pure function per strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.proxy.types import ModelCall


@dataclass(frozen=True, slots=True)
class RolloutRewards:
    """`final` is the reward of the rollout as a whole; `calls` holds the rewards of single calls by call id."""

    final: float
    calls: Mapping[str, float] = field(default_factory=dict)


Credit = Callable[[Sequence[ModelCall], RolloutRewards], list[float]]


def uniform(calls: Sequence[ModelCall], rewards: RolloutRewards) -> list[float]:
    """Copy the rollout's final return to every call (Agent Lightning, arXiv 2508.03680, section 3.3)."""
    return [rewards.final] * len(calls)


STRATEGIES: Mapping[str, Credit] = MappingProxyType({"uniform": uniform})


def credit_strategy(name: str) -> Credit:
    """The strategy called `name`; raises ConfigError naming the known ones."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ConfigError(f"trainer.credit: unknown strategy {name!r}, known are {', '.join(STRATEGIES)}") from None
