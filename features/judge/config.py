"""The section `judge`: what gives rewards in addition to `rewards.function`, and the models that judge."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr

from ...core.config.rollouts import RewardsConfig
from ...core.config.root import Config
from ...core.config.section import Count, FeatureSection, Number, Positive, Section, check_url

# The address of each API without `api_base`, and the variable that has its key.
APIS: dict[str, tuple[str, str]] = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "anthropic": ("https://api.anthropic.com", "ANTHROPIC_API_KEY"),
    "hosted_vllm": ("", "HOSTED_VLLM_API_KEY"),
}
MODELS_S = 900.0  # that models may take to reward a rollout


class BudgetConfig(Section):
    tokens: Count | None = None
    usd: Positive | None = None


class AskedModel(Section):
    model: str | None = None
    api_base: str | None = None

    @property
    def api(self) -> str:
        return (self.model or "").partition("/")[0]

    @property
    def address(self) -> str:
        return (self.api_base or APIS[self.api][0]).rstrip("/")

    @property
    def key(self) -> str | None:
        return os.environ.get(APIS[self.api][1]) or None

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the address is outside private networks, so that a third party may read the questions."""
        host = urlsplit(self.address).hostname or ""
        try:
            return not ip_address(host).is_private
        except ValueError:
            return "." in host and not host.endswith((".local", ".internal", ".svc", ".localhost"))

    def faults(self) -> Iterator[str]:
        if self.model is None:
            return
        if self.api not in APIS or not self.model.partition("/")[2]:
            yield (
                f"model must be openai/NAME, anthropic/NAME or hosted_vllm/NAME, got {self.model!r}; for another "
                "provider with OpenAI's API, set model to openai/NAME and api_base to its address"
            )
        if not self.address:
            yield "model hosted_vllm/… needs api_base, such as http://127.0.0.1:8200/v1"
        check_url("api_base", self.address, is_vllm=False)


class Criterion(Section):
    name: Annotated[str, Field(min_length=1)]
    question: str
    scale: Literal["yes/no", "0-4"] = "yes/no"
    weight: Positive = 1.0


class RewarderConfig(AskedModel):
    kind: Literal["rank", "rubric", "next_message"]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    api_key: SecretStr | None = None
    aim: str | None = None
    criteria: list[Criterion] = []

    @property
    def key(self) -> str | None:
        return self.api_key.get_secret_value() if self.api_key else super().key

    def faults(self) -> Iterator[str]:
        for key, kind in (("aim", "rank"), ("criteria", "rubric")):
            if getattr(self, key) and self.kind != kind:
                yield f"{key} is for kind {kind}, not {self.kind}"
        if self.model is None and self.kind != "next_message":
            yield f"kind {self.kind} needs a model, such as openai/gpt-5-mini or hosted_vllm/Qwen/Qwen3-8B"
        if not self.criteria and self.kind == "rubric":
            yield "kind rubric needs criteria, as in [{name: correct, question: Is the result right?}]"
        yield from super().faults()


class CallsConfig(AskedModel):
    weight: Number = 1.0


class JudgeConfig(FeatureSection):
    """`use`: the rewarders. `calls`: the judge of calls (`trainer.credit: judge`). `budget`: what models may use."""

    name = "judge"
    functions = {"credit": ("judge",)}
    moved = {"rewards.use": "judge.use", "rewards.budget": "judge.budget", "trainer.judge": "judge.calls"}

    use: list[RewarderConfig] = []
    budget: BudgetConfig = BudgetConfig()
    calls: CallsConfig = CallsConfig()

    def named(self, rewards: RewardsConfig) -> list[tuple[str, RewarderConfig]]:
        """Return each rewarder of `use` with its rewards' name: its own, or `reward` if alone, or else its kind."""
        alone = len(self.use) == 1 and rewards.function is None
        return [(entry.name or ("reward" if alone else entry.kind), entry) for entry in self.use]

    def judges(self, config: Config) -> list[tuple[str, RewarderConfig]]:
        """Return the rewarders of `use` with their rewards' names, and the judge of calls if credit uses it."""
        calls: dict[str, Any] = {"kind": "judge", "model": self.calls.model, "api_base": self.calls.api_base}
        is_used = "judge" in config.trainer.credits.values()
        return [*self.named(config.rewards), *([("judge", RewarderConfig.model_construct(**calls))] if is_used else [])]

    @property
    def longest_wait_s(self) -> float | None:
        return MODELS_S if self.use or self.calls.model else None

    def not_absolute(self, names: Collection[str]) -> str | None:
        ranked = {name for name, entry in self.named(RewardsConfig()) if entry.kind == "rank"}
        if not names or not ranked.issuperset(names):
            return None
        return "rank only compares siblings; `eval` needs an absolute reward, such as `rubric`"

    def training_weights(self, credits: Collection[str]) -> Mapping[str, float]:
        return {"judge": self.calls.weight} if "judge" in credits else {}

    def check(self, config: Config) -> None:
        names = Counter([*(name for name, _ in self.judges(config)), config.rewards.name])
        if twice := [name for name, n in names.items() if n > 1]:
            raise ValueError(f"judge.use: two rewarders give rewards named {twice[0]!r}; rename one")
        if "judge" not in config.trainer.credits.values():
            return
        if self.calls.model is None:
            raise ValueError("trainer.credit: judge needs judge.calls.model, such as openai/gpt-5-mini")
        if config.trainer.failed_rollouts != "drop":
            raise ValueError(
                "trainer.credit: judge does not score failed rollouts: set trainer.failed_rollouts to drop"
            )
