"""The configuration of the core: its sections, and checks across them. `root.py` adds the side rooms' keys."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import Field, model_validator

from .policy import PolicyConfig, VllmConfig
from .rollouts import RewardsConfig, RolloutsConfig
from .run import RunConfig
from .section import Section
from .server import ProxyConfig, RecordingConfig, StoreConfig
from .trainer import TrainerConfig
from .upstreams import UpstreamConfig, check_fallbacks

Usd = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CoreConfig(Section):
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
    prices: dict[str, Annotated[list[Usd], Field(min_length=2, max_length=3)]] = {}

    @model_validator(mode="after")
    def _has_an_upstream(self) -> CoreConfig:
        if not self.upstreams:
            raise ValueError("upstreams: at least one is needed")
        check_fallbacks({upstream.name: upstream.fallbacks for upstream in self.upstreams}, len(self.upstreams))
        return self

    @model_validator(mode="after")
    def _names_the_plugins_that_the_trainer_uses(self) -> CoreConfig:
        if missing := self.trainer.plugins - {*self.plugins}:
            raise ValueError(f"trainer: {', '.join(sorted(missing))} is no plugin of yours: add it to plugins")
        return self

    @model_validator(mode="after")
    def _tells_the_trainer_which_rewards_there_are(self) -> CoreConfig:
        if self.trainer.reward_range != self.rewards.range:
            self.__dict__["trainer"] = self.trainer.within(self.rewards.range)  # frozen, but not yet seen by anybody
        return self

    @model_validator(mode="after")
    def _publishes_all_weights_merged(self) -> CoreConfig:
        if self.trainer.weights == "full" and self.policy.publish == "lora":
            raise ValueError("trainer.weights full has no adapter to publish: set policy.publish to merged or auto")
        if self.trainer.weights == "full" and self.policy.adapters:
            raise ValueError("trainer.weights full is one set of weights for all agents: leave out policy.adapters")
        return self

    @model_validator(mode="after")
    def _publishes_adapters_behind_a_router(self) -> CoreConfig:
        """A router cannot leave out a server while its weights are replaced. Adapters have names of their own."""
        policys = self.policy_upstream
        if policys is not None and policys.servers and self.policy.publish != "lora":
            raise ValueError("upstreams: servers behind a router need policy.publish lora")
        return self

    @property
    def merged_obstacle(self) -> str | None:
        """Return why weights cannot be published merged, as a side room says; None if they can."""
        return None

    @cached_property
    def policy_upstream(self) -> UpstreamConfig | None:
        """Return the upstream that serves the policy, the first of kind vllm; None without one."""
        return next((upstream for upstream in self.upstreams if upstream.kind == "vllm"), None)

    def keys(self) -> list[str]:
        """Return every secret key in the configuration: ours, the upstreams' and those of side rooms."""
        return [*self.secret_keys(), *(secret for upstream in self.upstreams for secret in upstream.secrets())]
