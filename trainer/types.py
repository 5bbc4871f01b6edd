"""The trainer's data: rewards of a rollout, siblings, samples, batches. Plain data, no torch."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.config.policy import DEFAULT_ADAPTER
from ..core.records import ModelCall, Reward, RolloutStatus
from ..core.returns import Earned, Rules, earned, return_of

# Called with every finished step: its number and its metrics (`metric_schema`).
Show = Callable[[int, Mapping[str, Any]], None]

# Returns a step's batch with guidance in its samples, also where rewards teach nothing. Raises GuideError.
Guide = Callable[["Batch"], Awaitable["Batch"]]


@dataclass(frozen=True, slots=True)
class RolloutRewards:
    """The weighted rewards of a rollout. Call rewards are keyed by call id.

    `final` is the rollout's own (None if it has none), `calls` were posted for single calls. `air` is what automatic
    intermediate rewarding adds to calls; it never replaces a posted reward. `named` has the unweighted rewards of each
    name.
    """

    final: float | None
    calls: Mapping[str, float] = field(default_factory=dict)
    air: Mapping[str, float] = field(default_factory=dict)
    named: Mapping[str, Earned] = field(default_factory=dict)

    @classmethod
    def counted(cls, rewards: Sequence[Reward], rules: Rules, status: RolloutStatus = "completed") -> RolloutRewards:
        """Return the rewards of a rollout with this status, as the rules count them. `rewards` must be oldest first."""
        found = earned(rewards, rules, status)
        named = {name: earned(rewards, rules._replace(weights={name: 1.0}), status) for name in rules.weights}
        return cls(found.own, found.calls, named=named)

    @property
    def posted(self) -> float | None:
        """Return the rollout's own reward, or else the sum of its calls' rewards; None if there are neither."""
        return return_of(self.final, self.calls.values())

    @property
    def total(self) -> float:
        """Return the rollout's return: `posted` (None counts as 0) plus the automatic rewards."""
        return (self.posted or 0.0) + math.fsum(self.air.values())

    @property
    def sum(self) -> float:
        """Return the sum of all rewards: the rollout's own, its calls' and the automatic ones."""
        return (self.final or 0.0) + math.fsum(self.calls.values()) + math.fsum(self.air.values())

    def of_call(self, call_id: str) -> float:
        return self.calls.get(call_id, 0.0) + self.air.get(call_id, 0.0)


@dataclass(frozen=True, slots=True)
class Sifted:
    """The calls of a rollout, and which of them teach nothing or are made less likely.

    `left_out` has the indices of the former, `negative` of the latter. `counts` is by step metric.
    """

    calls: Sequence[ModelCall] = ()
    left_out: Set[int] = frozenset()
    negative: Set[int] = frozenset()
    counts: Mapping[str, int] = field(default_factory=dict)


# Says what becomes of all of a rollout's calls.
Sift = Callable[[Sequence[ModelCall]], Sifted]


@dataclass(frozen=True, slots=True)
class Sibling:
    """A rollout in a comparison with others: its calls, in order, and its rewards."""

    calls: Sequence[ModelCall]
    rewards: RolloutRewards
    sifted: Sifted = Sifted()

    def only(self, places: Sequence[int]) -> Sibling:
        """Return the sibling with only the calls at `places` and their rewards. The rollout's own rewards stay."""
        calls, rewards = [self.calls[i] for i in places], self.rewards

        def kept(values: Mapping[str, float]) -> dict[str, float]:
            return {call.call_id: values[call.call_id] for call in calls if call.call_id in values}

        named = {name: Earned(of.own, kept(of.calls)) for name, of in rewards.named.items()}
        return Sibling(calls, RolloutRewards(rewards.final, kept(rewards.calls), kept(rewards.air), named))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How vLLM turned a model's logits into the distribution that an answer was sampled from.

    The default of every field has no effect. `allowed` None means all tokens. `stop_tokens` are the request's, and
    cannot be among the first `min_tokens` tokens. `grammar` is vLLM's structured outputs, as JSON.
    """

    temperature: float = 1.0
    allowed: tuple[int, ...] | None = None
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    grammar: str | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the logits are only divided by the temperature."""
        return self == Sampling(self.temperature, stop_tokens=self.stop_tokens)

    def fits(self, vocabulary: int | None) -> bool:
        """Return whether a sampler accepts the numbers, and a vocabulary of this size (None: any) has the tokens."""
        numbers = (self.temperature, self.frequency_penalty, self.presence_penalty, *(value for _, value in self.bias))
        tokens = (*(self.allowed or ()), *self.stop_tokens, *(token for token, _ in self.bias))
        return (
            all(map(math.isfinite, numbers))
            and 0 < self.repetition_penalty < math.inf
            and 0 < self.top_p <= 1
            and 0 <= self.min_p <= 1
            and self.allowed != ()
            and all(0 <= token < (vocabulary or math.inf) for token in tokens)
        )


class Guidance(NamedTuple):
    """A guide's log-probabilities for a row's tokens, NaN where it gives none.

    `weight` is how much each nat of difference from the policy's log-probability adds to a token's advantage.
    """

    logprobs: tuple[float, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of one rollout. Fields with a value per token are as long as `token_ids`.

    `mask[i]` is 1 where the policy sampled `token_ids[i]` and 0 for context; there `logprobs` and `advantages` are 0.0.
    `temperatures[i]` is the sampling temperature of the call that token i belongs to (1.0 for context).
    `shaped` has the answers [start, end) that were not sampled by temperature alone; their prompt is the row before
    them. `results` has the context [start, end) that tools wrote between two answers, including what the chat template
    puts around it. `adapter` sampled every answer in the row, and is the one that the row trains. `advantages` come
    from rewards; what `guidance` adds to them is only known once the policy has scored the row.
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
    shaped: tuple[tuple[int, int, Sampling], ...] = ()
    results: tuple[tuple[int, int], ...] = ()
    guidance: Guidance | None = None
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        guidance = self.token_ids if self.guidance is None else self.guidance.logprobs
        lists = (self.token_ids, self.mask, self.logprobs, self.advantages, self.temperatures, guidance)
        if len({*map(len, lists)}) != 1:
            raise ValueError(f"sample of {self.rollout_id}: its lists of values per token differ in length")
        if self.mask and self.mask[0]:
            raise ValueError(f"sample of {self.rollout_id}: its first token is marked as sampled, but has no context")

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step, and what goes into the step's metrics.

    `compared` is the number of compared rollouts, including those that taught nothing. The loss is averaged over them.
    0 means the rollouts of the samples. `compared_by_adapter` counts the rollouts that each adapter's agents took part
    in, if agents have their own adapters. `tasks` has the mean, spread and number of rewards by task. `left_out` says
    why most calls are left out, if they are. `version` is the policy version that the step begins with, or None if its
    weights were not published.
    """

    step: int
    samples: tuple[Sample, ...]
    rollout_ids: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    compared_by_adapter: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: str | None = None
    version: int | None = None
