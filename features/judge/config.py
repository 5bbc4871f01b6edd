"""The section `judge`: what gives rewards, and the models that judge."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from ...core.config.rollouts import RewardsConfig
from ...core.config.root import Config
from ...core.config.section import FeatureSection, Number, Positive, Seconds, Section, check_url

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
            raise ValueError(f"kind {self.kind} takes no model here: a judge's is judge.calls.model")
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


class CallsConfig(Section):
    model: str | None = None
    api_base: str | None = None
    weight: Number = 1.0
    concurrency: Annotated[int, Field(ge=1)] = 8
    timeout_s: Seconds = 60.0


class JudgeConfig(FeatureSection):
    """`use`: what gives rewards to rollouts. `calls`: the judge of single calls (`trainer.credit: judge`)."""

    name = "judge"
    functions = {"credit": ("judge",)}
    moved = {"rewards.use": "judge.use", "rewards.budget": "judge.budget", "trainer.judge": "judge.calls"}

    use: list[RewarderConfig] = []
    budget: BudgetConfig = BudgetConfig()
    calls: CallsConfig = CallsConfig()

    def rewarders(self, rewards: RewardsConfig) -> list[tuple[str, RewarderConfig]]:
        """Return all that give rewards, with the names of their rewards. `rewards.function` alone is one of them.

        One that is alone, beside a judge of calls, posts `reward`; several have their kind's name, or `name`.
        """
        named = any(one.kind == "function" for one in self.use)
        all_ = [*([] if rewards.function is None or named else [RewarderConfig(kind="function")]), *self.use]
        alone = sum(one.kind != "judge" for one in all_) == 1
        own = {"function": rewards.name, "judge": "judge"}
        return [(own.get(one.kind) or one.name or ("reward" if alone else one.kind), one) for one in all_]

    @property
    def longest_wait_s(self) -> float | None:
        return MODELS_S if self.use else None

    def not_absolute(self, names: Collection[str]) -> str | None:
        ranked = {name for name, one in self.rewarders(RewardsConfig()) if one.kind == "rank"}
        if not names or not ranked.issuperset(names):
            return None
        return "rank only compares siblings; `eval` needs an absolute reward, such as `rubric`"

    def training_weights(self, credits: Collection[str]) -> Mapping[str, float]:
        return {"judge": self.calls.weight} if "judge" in credits else {}

    def check(self, config: Config) -> None:
        names = Counter(name for name, _ in self.rewarders(config.rewards))
        if twice := [name for name, n in names.items() if n > 1]:
            raise ValueError(f"judge.use: two entries give a reward named {twice[0]!r}; rename one")
        if config.rewards.function is None and any(one.kind == "function" for one in self.use):
            raise ValueError("judge.use: kind function needs rewards.function, as in scoring.py:reward")
        paid = [one for one in self.use if one.asks or one.kind == "judge"]
        if self.budget.usd is not None and any(one.price is None for one in paid):
            raise ValueError("judge.budget.usd needs each model's price, in USD per million tokens: price: [0.25, 2]")
        if "judge" in config.trainer.credits.values() and self.calls.model is None:
            raise ValueError("trainer.credit judge needs judge.calls.model, as litellm names it (openai/gpt-4o-mini)")
