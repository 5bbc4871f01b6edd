"""The section `trainer`: credit, loss, schedule and the other settings of a training step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from cronsim import CronSim, CronSimError
from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .rollouts import DEFAULT_RANGE
from .section import (
    Above0,
    CanBeOff,
    Count,
    FeatureSection,
    Natural,
    NotNegative,
    Number,
    Positive,
    Seconds,
    Section,
    Share,
    Unit,
    WithFeatures,
    feature_sections,
)  # fmt: skip

# A function of the user's own in a file, or one of a plugin.
_OWN = re.compile(r"(.+\.py|[A-Za-z0-9_.-]+):[A-Za-z_][A-Za-z0-9_]*")


AirEvent = Literal["tool_error", "bad_arguments", "repeated_call", "truncated"]


def _cron(text: str) -> str:
    """The cron expression for a time of day (02:00). Any other text is returned unchanged."""
    day = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip())
    return f"{int(day[2])} {int(day[1])} * * *" if day else text


def _times(text: str, now: float, *, reverse: bool = False) -> Iterator[float]:
    """The scheduled times from 4 h before `now` on or, with `reverse`, from 4 h after `now` backwards."""
    begin = datetime.fromtimestamp(now + 4 * 3600 if reverse else now - 4 * 3600)
    return (moment.timestamp() for moment in CronSim(_cron(text), begin, reverse=reverse))


def _time(value: Any) -> Any:
    """Check a time. Turn an integer back into a time of day, because YAML reads 12:30 as 12 * 60 + 30."""
    text = f"{value // 60:02}:{value % 60:02}" if type(value) is int else value
    try:
        next(_times(str(text), 0.0))
    except (CronSimError, StopIteration):
        raise ValueError(f"{text!r} is neither a time of day (02:00) nor a cron expression (0 2 * * 1-5)") from None
    return text


class ScheduleConfig(Section):
    when: Literal["continuous", "rollouts", "times"] = "continuous"
    every_rollouts: Count = 512
    at: list[Annotated[str, BeforeValidator(_time)]] = []

    def faults(self) -> Iterator[str]:
        if self.when == "times" and not self.at:
            yield 'schedule.when times needs schedule.at, such as ["02:00"]'

    def last_time(self, now: float) -> float | None:
        """Return the last scheduled time up to `now` (Unix times); None if there was none for many years."""
        last = (next((t for t in _times(text, now, reverse=True) if t <= now), None) for text in self.at)
        return max((moment for moment in last if moment is not None), default=None)

    def next_time(self, now: float) -> float:
        """Return the next scheduled time after `now` (Unix times)."""
        return min(next(t for t in _times(text, now) if t > now) for text in self.at)


LossType = Literal["cispo", "grpo", "sapo", "vespo", "dapo", "bnpo", "dr_grpo", "luspo"]


class EntropyConfig(Section):
    coef: NotNegative = 0.0
    target: Positive | None = None

    @property
    def counts(self) -> bool:
        """Return whether the loss may have an entropy bonus."""
        return self.coef > 0 or self.target is not None


class CollapseConfig(Section):
    action: Annotated[Literal["stop", "rollback", "warn", "off"], CanBeOff] = "stop"
    reward_stop: Annotated[float, Field(ge=3)] = 5.0
    min_drop: Unit = 0.25
    max_clip_share: Share | None = 0.3
    max_kl: Positive | None = 1.0
    max_kl_base: Positive | None = 5.0


class TrainerConfig(WithFeatures):
    functions: ClassVar[Mapping[str, Sequence[str]]] = {
        "credit": ("uniform", "discounted", "anchor"),
        "baseline": ("grpo", "dr_grpo", "rloo", "reinforce_pp"),
    }

    agents: Annotated[list[str], Field(min_length=1)] | None = None
    agent_credit: Literal["team", "own"] = "team"
    credit: str | dict[str, str] = "uniform"
    discount: Unit = 1.0
    anchor_weight: NotNegative = 1.0
    reward_weights: dict[str, Number] = {"reward": 1.0}
    air: dict[AirEvent, Number] = {}
    schedule: ScheduleConfig = ScheduleConfig()
    baseline: str = "grpo"
    compare: Literal["task", "step"] = "task"
    lone_rollouts: Literal["drop", "running"] = "drop"
    failed_rollouts: Literal["drop", "zero"] | Number = "drop"
    group_size: Annotated[int, Field(ge=2, le=1000)] = 8
    tasks_per_step: Count = 8
    group_timeout_s: Seconds = 600.0
    dynamic_sampling: bool = False
    max_steps: Count | None = None
    max_staleness: Natural = 8
    loss_type: LossType = "cispo"
    loss: str | None = None
    context_loss: str | None = None
    parameters: dict[str, Any] = {}
    weighting: Literal["auto", "token", "rollout", "sequence"] = "auto"
    importance_level: Literal["token", "sequence"] = "token"
    learning_rate: Literal["auto"] | Positive = "auto"
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0
    max_grad_norm: Above0 = 1.0
    clip_low: Above0 = 0.2
    clip_high: Above0 = 0.3
    importance_cap: Above0 | None = 2.0
    kl_coef: NotNegative = 0.0
    kl_estimator: Literal["k2", "k3"] = "k2"
    kl_metric: bool = False
    entropy: EntropyConfig = EntropyConfig()
    collapse: CollapseConfig = CollapseConfig()
    weights: Literal["lora", "full"] = "lora"
    lora_rank: Count = 16
    lora_alpha: Count = 32
    lora_targets: list[str] | Literal["language", "all-linear"] = "language"
    devices: Annotated[list[Natural], Field(max_length=1)] = []
    max_tokens_per_batch: Count | None = None
    max_sample_tokens: Count | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    threads: Count | None = None
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3
    report_to: list[str] = ["tensorboard"]
    seed: int = 0
    _range: tuple[float, float] = PrivateAttr(DEFAULT_RANGE)

    def with_sections(self, limits: tuple[float, float], sections: tuple[FeatureSection, ...]) -> TrainerConfig:
        """Return the section with what it needs from others: `rewards.range` and the features' sections."""
        copy = self.with_features(sections)
        copy._range = limits
        return copy

    @property
    def reward_range(self) -> tuple[float, float]:
        """Return `rewards.range`. Stored rewards outside this range count as its nearer end."""
        return self._range

    @classmethod
    def known(cls, kind: str) -> list[str]:
        """Return the names of functions of one kind: the core's, then the installed features'."""
        added = (section.functions for section in feature_sections().values())
        return [name for functions in (cls.functions, *added) for name in functions.get(kind, ())]

    @model_validator(mode="before")
    @classmethod
    def _live_traffic_goes_back(cls, value: Any) -> Any:
        """Make `rollback` the default of `collapse.action` if `lone_rollouts` is `running`, as with live traffic."""
        if isinstance(value, dict) and value.get("lone_rollouts") == "running":
            collapse = value.get("collapse", {})
            return value | {"collapse": {"action": "rollback"} | collapse} if isinstance(collapse, dict) else value
        return value

    @field_validator("credit", "baseline", "loss", "context_loss", mode="before")
    @classmethod
    def _is_known(cls, value: Any, about: ValidationInfo) -> Any:
        """Refuse unknown function names, whether given for all agents or by agent."""
        known, may_be_own = cls.known(str(about.field_name)), about.field_name != "baseline"
        for one in value.values() if isinstance(value, dict) else (value,):
            if one not in (*known, None) and not (may_be_own and isinstance(one, str) and _OWN.fullmatch(one)):
                own = ["a function of your own as FILE.py:NAME or PLUGIN:NAME"] * may_be_own
                raise ValueError(f"must be one of {', '.join([*known, *own])}; got {one!r}")
        return value

    @field_validator("learning_rate", mode="wrap")
    @classmethod
    def _is_auto_or_positive(cls, value: Any, check: Callable[[Any], Any]) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(f"must be auto or a number greater than 0; got {value!r}") from None

    def faults(self) -> Iterator[str]:
        if self.lr_scheduler in ("linear", "cosine") and self.max_steps is None:
            yield f"lr_scheduler {self.lr_scheduler} needs max_steps, the step at which the rate reaches 0"
        if self.warmup_steps and self.lr_scheduler == "constant":
            yield "warmup_steps needs lr_scheduler constant_with_warmup, linear or cosine"
        if self.agent_credit == "own" and set(self.agents or ()) <= {"*"}:
            yield "agent_credit own needs agents to be named, as in agents: [planner, writer]"
        if self.loss_type == "luspo" and self.importance_level != "sequence":
            yield "loss_type luspo is a loss of entire answers: it needs importance_level: sequence"
        if self.loss_type == "vespo" and self.importance_level != "token":
            yield "loss_type vespo weighs entire answers by itself: it needs importance_level: token"

    @property
    def cap(self) -> float:
        """Return `importance_cap`, or infinity if it is None."""
        return math.inf if self.importance_cap is None else self.importance_cap

    @property
    def trains_here(self) -> bool:
        """Return whether our own process, not a service, takes the training steps."""
        return all(section.trains_here for section in self._sections)

    @property
    def has_guide(self) -> bool:
        """Return whether a feature scores tokens itself, so that even rollouts with equal rewards are trained on."""
        return any(section.has_guide for section in self._sections)

    @property
    def credits(self) -> dict[str, str]:
        """Return the credit functions by agent; `*` stands for all other agents."""
        return {"*": self.credit} if isinstance(self.credit, str) else self.credit

    @property
    def training_weights(self) -> dict[str, float]:
        """Return the training weight of each reward name."""
        weights = dict(self.reward_weights)
        for section in self._sections:
            weights |= section.training_weights(self.credits.values())
        return weights

    @property
    def takes_lone_rollouts(self) -> bool:
        """Return whether rollouts without a task are trained on."""
        return self.lone_rollouts == "running" or self.has_guide

    @property
    def compares_with_earlier(self) -> bool:
        """Return whether a rollout without siblings is a group of its own, compared with earlier rollouts."""
        return self.lone_rollouts == "running" and self.compare == "task"

    @property
    def rollouts_per_step(self) -> int:
        """Return how many rollouts a full step compares."""
        return self.group_size * self.tasks_per_step

    @property
    def plugins(self) -> set[str]:
        """Return the plugins that `credit`, `loss` and `context_loss` name."""
        named = (own.rpartition(":")[0] for own in (*self.credits.values(), self.loss or "", self.context_loss or ""))
        return {plugin for plugin in named if plugin and not plugin.endswith(".py")}

    @property
    def failed_reward(self) -> float | None:
        """Return the reward of a failed rollout, or None if failed rollouts are dropped."""
        return {"drop": None, "zero": 0.0}[value] if isinstance(value := self.failed_rollouts, str) else value
