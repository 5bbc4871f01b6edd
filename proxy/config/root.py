"""The configuration: its sections, and checks across them. `file.py` reads it."""

from __future__ import annotations

from functools import cached_property

from pydantic import model_validator

from .policy import PolicyConfig, VllmConfig
from .promotion import PromptsConfig
from .rollouts import RewardsConfig, RolloutsConfig
from .run import RunConfig
from .section import Section
from .server import ProxyConfig, RecordingConfig, StoreConfig, TelemetryConfig
from .trainer import TrainerConfig
from .upstreams import UpstreamConfig, check_fallbacks

ONE_SERVER = (
    "policy.promotion gated needs a second server where weights are published merged: one server has one version. "
    "Give the policy's upstream `replicas`, or set policy.publish to lora"
)


class Config(Section):
    proxy: ProxyConfig = ProxyConfig()
    store: StoreConfig = StoreConfig()
    plugins: list[str] = []
    upstreams: list[UpstreamConfig] = [UpstreamConfig(name="policy", base_url="http://127.0.0.1:8100/v1")]
    recording: RecordingConfig = RecordingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    rewards: RewardsConfig = RewardsConfig()
    run: RunConfig = RunConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    prompts: PromptsConfig = PromptsConfig()
    policy: PolicyConfig = PolicyConfig()
    vllm: VllmConfig = VllmConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _has_an_upstream(self) -> Config:
        if not self.upstreams:
            raise ValueError("upstreams: at least one is needed")
        check_fallbacks({upstream.name: upstream.fallbacks for upstream in self.upstreams}, len(self.upstreams))
        return self

    @model_validator(mode="after")
    def _names_the_plugins_that_the_trainer_uses(self) -> Config:
        if missing := self.trainer.plugins - {*self.plugins}:
            raise ValueError(f"trainer: {', '.join(sorted(missing))} is no plugin of yours: add it to plugins")
        return self

    @model_validator(mode="after")
    def _tells_the_trainer_which_rewards_there_are(self) -> Config:
        if self.trainer.reward_range != self.rewards.range:
            self.__dict__["trainer"] = self.trainer.within(self.rewards.range)  # frozen, but not yet seen by anybody
        return self

    @model_validator(mode="after")
    def _publishes_all_weights_merged(self) -> Config:
        if self.trainer.weights == "full" and self.policy.publish == "lora":
            raise ValueError("trainer.weights full has no adapter to publish: set policy.publish to merged or auto")
        if self.trainer.weights == "full" and self.policy.adapters:
            raise ValueError("trainer.weights full is one set of weights for all agents: leave out policy.adapters")
        return self

    @model_validator(mode="after")
    def _publishes_adapters_behind_a_router(self) -> Config:
        """A router cannot leave out a server while its weights are replaced. Adapters have names of their own."""
        policys = self.policy_upstream
        if policys is not None and policys.servers and self.policy.publish != "lora":
            raise ValueError("upstreams: servers behind a router need policy.publish lora")
        return self

    @model_validator(mode="after")
    def _can_test_a_version_beside_the_live_one(self) -> Config:
        """Merged weights are one version for each server, and we choose the server that answers."""
        if self.trainer.promote_every > 1 and not self.policy.is_gated:
            raise ValueError("trainer.promote_every is how many steps come to one test: set policy.promotion to gated")
        is_merged = self.policy.publish == "merged" or self.trainer.weights == "full"
        if is_merged and not self.can_test_merged_weights:
            raise ValueError(ONE_SERVER)
        return self

    @cached_property
    def can_test_merged_weights(self) -> bool:
        """Return whether a server is left for the live version while another one has the candidate, if need be."""
        policys = self.policy_upstream
        return policys is None or not self.policy.is_gated or len(policys.urls) > 1

    @cached_property
    def policy_upstream(self) -> UpstreamConfig | None:
        """Return the upstream that serves the policy, the first of kind vllm; None without one."""
        return next((upstream for upstream in self.upstreams if upstream.kind == "vllm"), None)

    def keys(self) -> list[str]:
        """Return every secret key in the configuration: ours, the upstreams' and the teacher's."""
        headers, teacher = self.telemetry.otlp_headers.values(), self.trainer.teacher.api_key
        held = (*self.proxy.api_keys, *self.proxy.admin_keys, *headers, *([teacher] if teacher else []))
        ours = [key.get_secret_value() for key in held]
        return [*ours, *(secret for upstream in self.upstreams for secret in upstream.secrets())]
