"""The section `judge`: what gives rewards, and the models that judge."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Literal
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
    """A model that judges, and where it is asked."""

    model: str | None = None
    api_base: str | None = None

    @property
    def api(self) -> str:
        return (self.model or "").partition("/")[0]

    @property
    def address(self) -> str:
        return (self.api_base or APIS[self.api][0]).rstrip("/")

    @property
    def is_elsewhere(self) -> bool:
        """Return whether somebody else reads the questions: the address is none of a private network."""
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
                f"model begins with openai/, anthropic/ or hosted_vllm/, got {self.model!r}; other "
                "providers have an address of OpenAI's protocol: model: openai/NAME, api_base: URL"
            )
        if not self.address:
            yield "model hosted_vllm/… needs api_base, as in http://127.0.0.1:8200/v1"
        check_url("api_base", self.address, is_vllm=False)


class Criterion(Section):
    name: Annotated[str, Field(min_length=1)]
    question: str
    scale: Literal["yes/no", "0-4"] = "yes/no"
    weight: Positive = 1.0


class RewarderConfig(AskedModel):
    kind: Literal["function", "judge", "rank", "rubric", "next_message"]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    api_key: SecretStr | None = None
    is_policy: bool = False
    concurrency: Count = 8
    aim: str | None = None
    criteria: list[Criterion] = []

    @property
    def judges(self) -> bool:
        """Return whether it judges by itself: it is neither a user's function, nor a judge of calls alone."""
        return self.kind not in ("function", "judge")

    @property
    def key(self) -> str | None:
        """Return the key of the model's API, if there is one."""
        return self.api_key.get_secret_value() if self.api_key else os.environ.get(APIS[self.api][1]) or None

    def faults(self) -> Iterator[str]:
        for key, kind in (("aim", "rank"), ("criteria", "rubric")):
            if getattr(self, key) and self.kind != kind:
                yield f"{key} is for kind {kind}, not {self.kind}"
        if self.model is not None and not self.judges:
            yield f"kind {self.kind} takes no model here: a judge's is judge.calls.model"
        if self.model is None and self.kind in ("rank", "rubric"):
            yield f"kind {self.kind} needs a model, as in openai/gpt-5-mini or hosted_vllm/Qwen/Qwen3-8B"
        if not self.criteria and self.kind == "rubric":
            yield "kind rubric needs criteria, as in [{name: correct, question: Is the result right?}]"
        yield from super().faults()


class CallsConfig(AskedModel):
    weight: Number = 1.0

    def rewarder(self, entry: RewarderConfig | None = None) -> RewarderConfig:
        """Return the judge of calls as a rewarder; `entry`: its entry in `judge.use`."""
        keys = {"model": self.model, "api_base": self.api_base}
        return (entry or RewarderConfig(kind="judge")).model_copy(update=keys)


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

        A single one, not counting a judge of calls, posts `reward`; several have their kind's name, or `name`.
        """
        named = any(entry.kind == "function" for entry in self.use)
        all_ = [*([] if rewards.function is None or named else [RewarderConfig(kind="function")]), *self.use]
        alone = sum(entry.kind != "judge" for entry in all_) == 1
        own = {"function": rewards.name, "judge": "judge"}
        return [
            (
                own.get(entry.kind) or entry.name or ("reward" if alone else entry.kind),
                self.calls.rewarder(entry) if entry.kind == "judge" else entry,
            )
            for entry in all_
        ]

    @property
    def longest_wait_s(self) -> float | None:
        return MODELS_S if self.use else None

    def not_absolute(self, names: Collection[str]) -> str | None:
        ranked = {name for name, entry in self.rewarders(RewardsConfig()) if entry.kind == "rank"}
        if not names or not ranked.issuperset(names):
            return None
        return "rank only compares siblings; `eval` needs an absolute reward, such as `rubric`"

    def training_weights(self, credits: Collection[str]) -> Mapping[str, float]:
        return {"judge": self.calls.weight} if "judge" in credits else {}

    def check(self, config: Config) -> None:
        rewarders = self.rewarders(config.rewards)
        names = Counter(name for name, _ in rewarders)
        if twice := [name for name, n in names.items() if n > 1]:
            raise ValueError(f"judge.use: two entries give a reward named {twice[0]!r}; rename one")
        if config.rewards.function is None and any(entry.kind == "function" for entry in self.use):
            raise ValueError("judge.use: kind function needs rewards.function, as in scoring.py:reward")
        of_calls = [*(entry.kind for entry in self.use), *config.trainer.credits.values()]
        if "judge" in of_calls and self.calls.model is None:
            raise ValueError("the judge of calls needs judge.calls.model, such as openai/gpt-5-mini")
