"""The configuration: all sections, including features', and the checks that concern several of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, SerializeAsAny, model_validator
from pydantic_core import PydanticCustomError

from .policy import PolicyConfig, VllmConfig
from .rollouts import RewardsConfig, RolloutsConfig, RunConfig
from .section import FeatureSection, NotNegative, WithFeatures, feature_sections
from .server import ProxyConfig, RecordingConfig, StoreConfig
from .trainer import TrainerConfig
from .upstreams import UpstreamConfig, fallback_faults


def _section_named(given: tuple[str, Any]) -> FeatureSection:
    name, value = given
    if (kind := feature_sections().get(name)) is None:
        raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted")
    return kind.model_validate(value)


class Config(WithFeatures):
    """The core's sections. Use `section` to read a feature's."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[SerializeAsAny[FeatureSection], PlainValidator(_section_named)]] = Field(
        init=False
    )

    proxy: ProxyConfig = ProxyConfig()
    store: StoreConfig = StoreConfig()
    plugins: list[str] = []
    upstreams: list[UpstreamConfig] = [UpstreamConfig(name="policy", base_url="http://127.0.0.1:8100/v1")]
    recording: RecordingConfig = RecordingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    rewards: RewardsConfig = RewardsConfig()
    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    vllm: VllmConfig = VllmConfig()
    trainer: TrainerConfig = TrainerConfig()
    prices: dict[str, Annotated[list[NotNegative], Field(min_length=2, max_length=3)]] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_features(cls, data: Any) -> Any:
        """Pair each feature's section with its name. Add the features that are not configured, with their defaults."""
        if not isinstance(data, Mapping):
            return data
        given = {**{name: {} for name in feature_sections()}, **data}
        return {name: value if name in cls.model_fields else (name, value) for name, value in given.items()}

    def model_post_init(self, _: Any) -> None:
        self.__dict__["trainer"] = self.trainer.with_sections(self.rewards.range, self.sections)

    @property
    def sections(self) -> tuple[FeatureSection, ...]:
        return tuple((self.__pydantic_extra__ or {}).values())

    def faults(self) -> Iterator[str]:
        if not self.upstreams:
            yield "upstreams: at least one is needed"
        yield from fallback_faults(self.upstreams)
        trainer, policy = self.trainer, self.policy
        if missing := trainer.plugins - {*self.plugins}:
            yield f"trainer needs these plugins: {', '.join(sorted(missing))}; add them to plugins"
        if not any(trainer.reward_weights.values()) and not (trainer.reward_weights and trainer.has_guide):
            yield (
                "trainer.reward_weights: name at least one reward. Give one a weight other than 0, unless a feature "
                "scores tokens itself"
            )
        for section in self.sections:
            section.check(self)
        if trainer.weights == "full" and policy.publish == "lora":
            yield "trainer.weights full has no adapter to publish: set policy.publish to merged or auto"
        if trainer.weights == "full" and policy.adapters:
            yield "trainer.weights full trains one set of weights for all agents: remove policy.adapters"
        # A router cannot leave out a server while its weights are replaced. Adapters have names of their own.
        if self.policy_upstream is not None and self.policy_upstream.servers and policy.publish != "lora":
            yield "upstreams: servers behind a router need policy.publish lora"

    @property
    def merged_obstacle(self) -> str | None:
        """Return why a feature prevents publishing merged weights; None if none does."""
        return next(filter(None, (section.merged_obstacle(self) for section in self.sections)), None)

    @property
    def longest_wait_s(self) -> float | None:
        """Return how long a rollout's reward may take after its end; None if nothing configured gives rewards."""
        own = None if self.rewards.function is None else self.rewards.timeout_s
        waits = (own, *(section.longest_wait_s for section in self.sections))
        return max((wait for wait in waits if wait is not None), default=None)

    def not_absolute(self, names: Collection[str]) -> str | None:
        """Return why rewards with these names cannot measure how good a version is; None if they may."""
        if self.rewards.function is not None:  # which may give rewards of any name
            return None
        return next(filter(None, (section.not_absolute(names) for section in self.sections)), None)

    @cached_property
    def policy_upstream(self) -> UpstreamConfig | None:
        """Return the upstream that serves the policy: the first of kind vllm; None if there is none."""
        return next((upstream for upstream in self.upstreams if upstream.kind == "vllm"), None)

    def keys(self) -> list[str]:
        """Return the secret keys of all sections, and the secrets in upstreams' addresses and `litellm_params`."""
        return [*self.secret_keys(), *(secret for upstream in self.upstreams for secret in upstream.secrets())]
