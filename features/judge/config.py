"""The keys `rewards.use` and `rewards.budget`, and `trainer.judge`: what gives rewards, and the models that judge."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from ...core.config.rollouts import RewardsConfig
from ...core.config.section import Number, Positive, Seconds, Section, check_url
from ...core.config.trainer import TrainerConfig

Api = Literal["openai", "anthropic", "hosted_vllm"]
# The address of each API without `api_base`, and the variable that has its key.
APIS: dict[str, tuple[str | None, str]] = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "anthropic": ("https://api.anthropic.com", "ANTHROPIC_API_KEY"),
    "hosted_vllm": (None, "HOSTED_VLLM_API_KEY"),
}
MODELS_S = 900.0  # that models may take to reward a rollout
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class BudgetConfig(Section):
    tokens: Annotated[int, Field(ge=1)] | None = None
    usd: Positive | None = None


class RewarderConfig(Section):
    kind: Literal["function", "judge", "rank", "rubric", "next_message"]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    model: str | None = None
    api_base: str | None = None
    api_key: SecretStr | None = None
    is_policy: bool = False
    price: Annotated[list[Price], Field(min_length=2, max_length=2)] | None = None
    concurrency: Annotated[int, Field(ge=1)] = 8
    timeout_s: Seconds = 120.0
    aim: str | None = None
    file: Path | None = None
    longest: Annotated[int, Field(ge=200)] = 8000
    at_once: Annotated[int, Field(ge=3, le=26)] = 8

    @property
    def judges(self) -> bool:
        """Return whether it judges by itself: it is neither a user's function, nor a judge of calls alone."""
        return self.kind not in ("function", "judge")

    @property
    def asks(self) -> bool:
        """Return whether it asks a model through `Model`."""
        return self.model is not None and self.judges

    @property
    def api(self) -> str:
        """Return which API the model has."""
        return (self.model or "").partition("/")[0]

    @property
    def model_name(self) -> str:
        """Return what its API calls the model."""
        return (self.model or "").partition("/")[2]

    @property
    def address(self) -> str:
        """Return where the model is asked."""
        return (self.api_base or APIS[self.api][0] or "").rstrip("/")

    @property
    def key(self) -> str | None:
        """Return the key of the model's API, if there is one."""
        return self.api_key.get_secret_value() if self.api_key else os.environ.get(APIS[self.api][1]) or None

    @property
    def is_elsewhere(self) -> bool:
        """Return whether somebody else reads the questions: the address is none of a private network."""
        host = urlsplit(self.address).hostname or ""
        try:
            return not ip_address(host).is_private
        except ValueError:
            return "." in host and not host.endswith((".local", ".internal", ".svc", ".localhost"))

    @model_validator(mode="after")
    def _can_be_asked(self) -> RewarderConfig:
        for key, kind in (("aim", "rank"), ("file", "rubric")):
            if getattr(self, key) is not None and self.kind != kind:
                raise ValueError(f"{key} is for kind {kind}, not {self.kind}")
        if self.model is not None and not self.judges:
            raise ValueError(f"kind {self.kind} takes no model here: a judge's is trainer.judge.model")
        if self.kind == "rank" and self.model is None:
            raise ValueError("kind rank needs a model, as in openai/gpt-5-mini or hosted_vllm/Qwen/Qwen3-8B")
        if self.kind == "rubric" and self.file is None:
            raise ValueError("kind rubric needs file, a YAML file of criteria")
        if self.model is None:
            return self
        if self.api not in APIS or not self.model_name:
            raise ValueError(
                f"model begins with openai/, anthropic/ or hosted_vllm/, got {self.model!r}; other "
                "providers have an address of OpenAI's protocol: model: openai/NAME, api_base: URL"
            )
        if not self.address:
            raise ValueError("model hosted_vllm/… needs api_base, as in http://127.0.0.1:8200/v1")
        check_url("api_base", self.address, is_vllm=False)
        return self


class RewarderKeys(RewardsConfig):
    use: list[RewarderConfig] = []
    budget: BudgetConfig = BudgetConfig()

    @property
    def rewarders(self) -> list[tuple[str, RewarderConfig]]:
        """Return all that give rewards, with the names of their rewards. `function` alone is one of them.

        One that is alone, beside a judge of calls, posts `reward`; several have their kind's name, or `name`.
        """
        named = any(one.kind == "function" for one in self.use)
        all_ = [*([] if self.function is None or named else [RewarderConfig(kind="function")]), *self.use]
        alone = sum(one.kind != "judge" for one in all_) == 1
        own = {"function": self.name, "judge": "judge"}
        return [(own.get(one.kind) or one.name or ("reward" if alone else one.kind), one) for one in all_]

    @property
    def longest_wait_s(self) -> float | None:
        """Return the core's, or as long as models may take."""
        return MODELS_S if self.use else super().longest_wait_s

    def not_absolute(self, names: Collection[str]) -> str | None:
        """Return why, if `rank` alone gives them. A function may give rewards of any name."""
        ranked = {name for name, one in self.rewarders if one.kind == "rank"}
        if self.function is not None or not names or not ranked.issuperset(names):
            return None
        return "rank only compares siblings; `eval` needs an absolute reward, such as `rubric`"

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> RewarderKeys:
        names = Counter(name for name, _ in self.rewarders)
        if twice := [name for name, n in names.items() if n > 1]:
            raise ValueError(f"use: two give rewards named {twice[0]}: give one another name")
        if self.function is None and any(one.kind == "function" for one in self.use):
            raise ValueError("use: kind function needs rewards.function, as in scoring.py:reward")
        paid = [one for one in self.use if one.asks or one.kind == "judge"]
        if self.budget.usd is not None and any(one.price is None for one in paid):
            raise ValueError("budget.usd needs the price of each model, in USD per million tokens: price: [0.25, 2]")
        return self


class JudgeConfig(Section):
    model: str | None = None
    api_base: str | None = None
    weight: Number = 1.0
    concurrency: Annotated[int, Field(ge=1)] = 8
    timeout_s: Seconds = 60.0


class JudgeKeys(TrainerConfig):
    names = {"credit": ("judge",)}

    judge: JudgeConfig = JudgeConfig()

    @property
    def judged(self) -> bool:
        """Return whether a judge scores any calls."""
        return "judge" in ([self.credit] if isinstance(self.credit, str) else self.credit.values())

    @model_validator(mode="after")
    def _has_a_judge(self) -> JudgeKeys:
        if self.judged and self.judge.model is None:
            raise ValueError("credit judge needs judge.model, as litellm names it (openai/gpt-4o-mini)")
        return self

    @property
    def training_weights(self) -> dict[str, float]:
        """Return those of the return that is shown, and the judge's."""
        own = {"judge": self.judge.weight} if self.judged else {}
        return {**super().training_weights, **own}
