"""The configuration: its sections, those of features among them, and checks across them. `file.py` reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, SerializeAsAny, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from .feature import FeatureSection, Kind, Sections, feature_sections
from .policy import PolicyConfig, VllmConfig
from .rollouts import RewardsConfig, RolloutsConfig
from .run import RunConfig
from .section import Section
from .server import ProxyConfig, RecordingConfig, StoreConfig
from .trainer import TrainerConfig
from .upstreams import UpstreamConfig, check_fallbacks

Usd = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Config(Section):
    """The core's sections. Those of features are read with `section`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SerializeAsAny[FeatureSection]] = Field(init=False)

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

    def section(self, kind: type[Kind]) -> Kind:
        """Return a feature's section."""
        return self.sections.section(kind)

    @property
    def sections(self) -> Sections:
        """Return the sections of all features."""
        return Sections(self.__pydantic_extra__.values())

    @model_validator(mode="wrap")
    @classmethod
    def _with_features(cls, data: Any, build: ModelWrapValidatorHandler[Config]) -> Config:
        """Check the sections of features as those of the core are, and tell all that is wrong at once."""
        if not isinstance(data, Mapping):
            return build(data)
        kinds, wrong = feature_sections(), list[InitErrorDetails]()
        known = {name: value for name, value in data.items() if name in cls.model_fields}
        for name in data.keys() - known.keys() - kinds.keys():
            wrong.append(_detail("extra_forbidden", "Extra inputs are not permitted", (name,)))
        for name, kind in kinds.items():
            try:
                known[name] = kind.model_validate(data.get(name, {}))
            except ValidationError as error:
                wrong += [_detail(one["type"], one["msg"], (name, *one["loc"])) for one in error.errors()]
                known[name] = kind()
        try:
            config = build(known)
        except ValidationError as error:
            wrong += [_detail(one["type"], one["msg"], one["loc"]) for one in error.errors()]
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return config

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
    def _tells_the_trainer_of_other_sections(self) -> Config:
        self.__dict__["trainer"] = self.trainer.with_sections(
            self.rewards.range, self.sections
        )  # not yet seen by anybody
        return self

    @model_validator(mode="after")
    def _counts_some_reward(self) -> Config:
        if not any(self.trainer.reward_weights.values()) and not (
            self.trainer.reward_weights and self.trainer.has_guide
        ):
            raise ValueError("trainer.reward_weights: name at least one reward. Its weight is not 0, unless a feature "
                             "teaches something beside rewards")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _goes_with_the_sections_of_features(self) -> Config:
        for section in self.sections:
            if isinstance(section, CheckedSection):
                section.check(self)
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

    @property
    def merged_obstacle(self) -> str | None:
        """Return why weights cannot be published merged, as a feature says; None if they can."""
        checked = (section for section in self.sections if isinstance(section, CheckedSection))
        return next(filter(None, (section.merged_obstacle(self) for section in checked)), None)

    @property
    def longest_wait_s(self) -> float | None:
        """Return how long a rollout's reward may take once it has ended; None if nothing here gives any."""
        waits = (self.rewards.longest_wait_s, *(section.longest_wait_s for section in self.sections))
        return max((wait for wait in waits if wait is not None), default=None)

    def not_absolute(self, names: Collection[str]) -> str | None:
        """Return why rewards of these names cannot tell how good a version is; None if they can."""
        has_function = self.rewards.function is not None
        found = (section.not_absolute(names, has_function=has_function) for section in self.sections)
        return next(filter(None, found), None)

    @cached_property
    def policy_upstream(self) -> UpstreamConfig | None:
        """Return the upstream that serves the policy, the first of kind vllm; None without one."""
        return next((upstream for upstream in self.upstreams if upstream.kind == "vllm"), None)

    def keys(self) -> list[str]:
        """Return every secret key in the configuration: ours, the upstreams' and those of features."""
        return [*self.secret_keys(), *(secret for upstream in self.upstreams for secret in upstream.secrets())]


class CheckedSection(FeatureSection):
    """A feature's section that has to go with others."""

    def check(self, config: Config) -> None:
        """Raise ValueError, with a key's full name, if it does not."""

    def merged_obstacle(self, config: Config) -> str | None:
        """Return why weights cannot be published merged; None if they can."""
        return None


def _detail(kind: str, message: str, place: tuple[int | str, ...]) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError(kind, message), loc=place, input=None)
