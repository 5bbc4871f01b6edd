"""The configuration: its keys, their defaults, and what they may be. `config_file.py` reads it.

`config.yaml` shows every default, and a test compares the two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from . import cron

# The adapter of every agent that has none of its own; PEFT's name for it.
DEFAULT_ADAPTER = "default"
# Fewer earlier rollouts than these say too little of what a reward is usually like.
MIN_EARLIER = 4

_SENDABLE = "it may not be empty, nor hold spaces, line ends or other than ASCII characters"
_SECRET_NAME = re.compile(r"key|token|secret|password|authorization|credential", re.IGNORECASE)

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Limit = Annotated[int, Field(ge=1)] | None


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitsConfig(Section):
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    concurrent: Limit = None


class ProxyConfig(Section):
    host: str = "127.0.0.1"
    port: Port = 8080
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    api_keys: list[SecretStr] = []
    admin_keys: list[SecretStr] = []
    limits: LimitsConfig = LimitsConfig()
    max_body_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _can_be_sent(cls, keys: list[SecretStr]) -> list[SecretStr]:
        """An empty one, from a variable that is not set, say, would let everybody in."""
        if not all(_is_sendable(key) for key in keys):
            raise ValueError(f"a key cannot be sent: {_SENDABLE}")
        return keys

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the proxy."""
        return self.host in ("127.0.0.1", "::1", "localhost")


class RedactConfig(Section):
    secrets: bool = False
    patterns: list[str] = []
    fields: list[str] = []

    @field_validator("patterns")
    @classmethod
    def _find_something(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                if re.compile(pattern).search("") is not None:
                    raise ValueError(f"{pattern!r} matches the empty text")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    @field_validator("fields")
    @classmethod
    def _begin_with_what_is_stored(cls, fields: list[str]) -> list[str]:
        for path in fields:
            root, *names = path.split(".")
            if root not in ("request", "response", "metadata") or not names or "" in names:
                raise ValueError(f"{path!r} is no path such as request.user, response.choices.*.text or metadata.email")
        return fields


class RetentionConfig(Section):
    max_age_days: Annotated[float, Field(gt=0)] | None = None
    max_gib: Annotated[float, Field(gt=0)] | None = None


class StoreConfig(Section):
    url: str = "sqlite:///lightning.db"
    synchronous: Literal["normal", "full"] = "normal"
    busy_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 5.0  # in SQLite's milliseconds, .inf would be 0
    retention: RetentionConfig = RetentionConfig()

    @property
    def path(self) -> Path:
        """The database file of a `sqlite:///…` URL: three slashes for a relative path, four for an absolute one."""
        return Path(self.url.removeprefix("sqlite:///"))

    @model_validator(mode="after")
    def _supported(self) -> StoreConfig:
        if not self.url.startswith("sqlite:///") or self.url == "sqlite:///":
            raise ValueError(f"only sqlite:///FILE is supported so far, got {self.url!r}")
        return self


class UpstreamConfig(Section):
    name: str
    kind: Literal["vllm", "openai", "litellm"] = "vllm"
    base_url: str | None = None
    replicas: list[str] = []
    api_key: SecretStr | None = None
    api_key_header: Literal["authorization", "x-api-key"] = "authorization"
    models: list[str] = []
    model_map: dict[str, str] = {}
    litellm_params: dict[str, Any] = {}
    fallbacks: list[str] = []
    connect_timeout_s: Seconds = 5.0
    first_byte_timeout_s: Seconds = 600.0
    idle_timeout_s: Seconds = 300.0
    total_timeout_s: Seconds | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    retry_wait_s: Seconds = 30.0
    health_check_s: Seconds | None = None

    @cached_property
    def urls(self) -> tuple[str, ...]:
        """The servers: `base_url` and its replicas, without a slash at the end."""
        return tuple(url.rstrip("/") for url in (self.base_url, *self.replicas) if url is not None)

    @cached_property
    def credentials(self) -> dict[str, str]:
        """The header that carries its key; none without a key."""
        if self.api_key is None:
            return {}
        key, header = self.api_key.get_secret_value(), self.api_key_header
        return {header: f"Bearer {key}" if header == "authorization" else key}

    def secrets(self) -> list[str]:
        """Its key, and what `litellm_params` holds under a name that sounds secret."""
        own = [] if self.api_key is None else [self.api_key.get_secret_value()]
        return [*own, *_secret_texts(self.litellm_params, secret=False)]

    @model_validator(mode="after")
    def _urls(self) -> UpstreamConfig:
        if self.api_key is not None and not _is_sendable(self.api_key):
            raise ValueError(f"api_key cannot be sent: {_SENDABLE}")
        if self.kind == "litellm":
            self._check_litellm()
            return self
        for key, url in [("base_url", self.base_url), *(("replicas", url) for url in self.replicas)]:
            if not (url or "").startswith(("http://", "https://")) or not (url or "").rstrip("/").endswith("/v1"):
                raise ValueError(f"{key} must be an http(s) URL that ends in /v1, got {url!r}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("replicas must differ from each other and from base_url")
        if self.litellm_params:
            raise ValueError("litellm_params is for kind litellm only")
        return self

    def _check_litellm(self) -> None:
        if not self.models and not self.model_map:
            raise ValueError("kind litellm serves only what models or model_map name: name at least one")
        if self.replicas:
            raise ValueError("replicas are not for kind litellm")
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must be an http(s) URL, got {self.base_url!r}")
        if self.health_check_s and not self.base_url:
            raise ValueError("health_check_s needs a base_url to ask")


class RecordingConfig(Section):
    on_disconnect: Literal["abort", "finish"] = "abort"
    redact: RedactConfig = RedactConfig()


class TelemetryConfig(Section):
    otlp_endpoint: str | None = None
    otlp_headers: dict[str, SecretStr] = {}
    content: bool = False
    timeout_s: Seconds = 10.0

    @property
    def traces_url(self) -> str:
        return f"{(self.otlp_endpoint or '').rstrip('/')}/v1/traces"

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"an http(s) URL is needed, such as http://127.0.0.1:4318, got {url!r}")
        return url


# Part of file names, of names of served models, and of PyTorch modules.
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class PolicyConfig(Section):
    model: str | None = None
    alias: str = "policy"
    publish: Literal["lora", "merged", "auto"] = "auto"
    adapters: dict[AdapterName, Annotated[list[str], Field(min_length=1)]] = {}
    pin_rollouts: bool = True
    pin_timeout_s: Seconds = 3600.0
    token_continuity: Literal["text", "exact"] = "text"
    keep_versions: Annotated[int, Field(ge=2)] = 3
    directory: Path = Path("lightning-policy")
    verify_samples: Annotated[int, Field(ge=1)] = 4
    verify_tolerance: Annotated[float, Field(gt=0)] | None = None

    @field_validator("model")
    @classmethod
    def _home(cls, model: str | None) -> str | None:
        return str(Path(model).expanduser()) if model and model.startswith("~") else model

    @field_validator("adapters")
    @classmethod
    def _name_an_agent_once(cls, adapters: dict[str, list[str]]) -> dict[str, list[str]]:
        if DEFAULT_ADAPTER in adapters:
            raise ValueError(f"{DEFAULT_ADAPTER!r} is the adapter of agents that no list names: choose another name")
        named = Counter(agent for agents in adapters.values() for agent in agents)
        if twice := [agent for agent, n in named.items() if n > 1]:
            raise ValueError(f"an agent has one adapter, but this is named twice: {', '.join(twice)}")
        return adapters

    @model_validator(mode="after")
    def _serves_adapters_side_by_side(self) -> PolicyConfig:
        if self.adapters and self.publish == "merged":
            raise ValueError("policy.adapters needs policy.publish: lora; merged weights are those of one adapter")
        return self

    @cached_property
    def _adapter_by_agent(self) -> dict[str, str]:
        return {agent: name for name, agents in self.adapters.items() for agent in agents}

    def adapter_of(self, agent: str | None) -> str:
        """The adapter that answers the calls of this agent."""
        return self._adapter_by_agent.get(agent or "", DEFAULT_ADAPTER)


class VllmConfig(Section):
    host: str = "127.0.0.1"
    port: Port = 8100
    dtype: str = "auto"
    max_model_len: int | None = None
    kv_cache_gib: Annotated[float, Field(gt=0)] = 2.0
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    max_loras: Annotated[int, Field(ge=1)] = 4
    start_timeout_s: Seconds = 600.0
    extra_args: list[str] = []


Strategy = Literal["uniform", "discounted", "anchor", "judge"]
Number = Annotated[float, Field(allow_inf_nan=False)]


class AirConfig(Section):
    enabled: bool = False
    tool_error: Number = -0.1
    bad_arguments: Number = -0.1
    repeated_call: Number = -0.1
    truncated: Number = -0.1


class JudgeConfig(Section):
    model: str | None = None
    api_base: str | None = None
    weight: Number = 1.0
    concurrency: Annotated[int, Field(ge=1)] = 8
    timeout_s: Seconds = 60.0


class ScheduleConfig(Section):
    when: Literal["continuous", "rollouts", "times", "idle"] = "continuous"
    every_rollouts: Annotated[int, Field(ge=1)] = 512
    at: list[str] = []
    idle_s: Seconds = 300.0
    max_load: Annotated[float, Field(gt=0, le=1)] = 0.5

    @field_validator("at", mode="before")
    @classmethod
    def _unquoted(cls, times: Any) -> Any:
        """12:30 without quotes is a number to YAML: 12 times 60 and 30."""
        if not isinstance(times, list):
            return times
        return [f"{t // 60:02}:{t % 60:02}" if isinstance(t, int) and not isinstance(t, bool) else t for t in times]

    @field_validator("at")
    @classmethod
    def _are_times(cls, times: list[str]) -> list[str]:
        for text in times:
            cron.expression(text)
        return times

    @model_validator(mode="after")
    def _has_times(self) -> ScheduleConfig:
        if self.when == "times" and not self.at:
            raise ValueError('schedule.when times needs schedule.at, such as ["02:00"]')
        return self


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LossType = Literal["cispo", "grpo", "sapo", "vespo", "dapo", "bnpo", "dr_grpo", "luspo"]


class SapoConfig(Section):
    temperature_pos: Positive = 1.0
    temperature_neg: Positive = 1.05


class VespoConfig(Section):
    k_pos: Positive = 2.0
    lambda_pos: Positive = 3.0
    k_neg: Positive = 3.0
    lambda_neg: Positive = 2.0


class CollapseConfig(Section):
    action: Literal["stop", "rollback", "warn", "off"] = "stop"
    reward_warn: Positive = 3.0
    reward_stop: Positive = 5.0
    min_drop: Annotated[float, Field(ge=0, le=1)] = 0.25
    steps: Annotated[int, Field(ge=1)] = 3
    min_entropy: Annotated[float, Field(ge=0, lt=1)] = 0.1
    max_clip_share: Annotated[float, Field(gt=0, le=1)] | None = 0.3
    max_kl: Positive | None = 1.0
    max_kl_base: Positive | None = 5.0

    @model_validator(mode="after")
    def _warns_before_it_stops(self) -> CollapseConfig:
        if self.reward_stop < self.reward_warn:
            raise ValueError("reward_stop is less than reward_warn: it would stop without a warning")
        return self


class SftConfig(Section):
    min_reward: Number | None = None
    top: Annotated[int, Field(ge=1)] = 4
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Positive = 2e-4
    batch_tokens: Annotated[int, Field(ge=1)] = 2048
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1


class TrainerConfig(Section):
    agents: Annotated[list[str], Field(min_length=1)] | None = None
    agent_credit: Literal["team", "own"] = "team"
    credit: Strategy | dict[str, Strategy] = "uniform"
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    anchor_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    reward_weights: dict[str, Number] = {"reward": 1.0}
    air: AirConfig = AirConfig()
    judge: JudgeConfig = JudgeConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    baseline: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    lone_rollouts: Literal["drop", "running"] = "drop"
    running_window: Annotated[int, Field(ge=MIN_EARLIER)] = 32
    failed_rollouts: Literal["drop", "zero"] | Number = "drop"
    group_size: Annotated[int, Field(ge=2)] = 8
    tasks_per_step: Annotated[int, Field(ge=1)] = 8
    group_timeout_s: Seconds = 600.0
    max_steps: Annotated[int, Field(ge=1)] | None = None
    max_staleness: Annotated[int, Field(ge=0)] = 8
    loss_type: LossType = "cispo"
    importance_level: Literal["token", "sequence"] = "token"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.3
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    sapo: SapoConfig = SapoConfig()
    vespo: VespoConfig = VespoConfig()
    sft: SftConfig = SftConfig()
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    kl_metric: bool = False
    collapse: CollapseConfig = CollapseConfig()
    lora_rank: Annotated[int, Field(ge=1)] = 16
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    lora_targets: list[str] | Literal["all-linear"] = "all-linear"
    max_tokens_per_batch: Annotated[int, Field(ge=1)] = 8192
    max_sample_tokens: Annotated[int, Field(ge=1)] = 4096
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3
    report_to: list[str] = ["tensorboard"]
    poll_s: Seconds = 0.5
    seed: int = 0

    @model_validator(mode="after")
    def _decays_to_an_end(self) -> TrainerConfig:
        if self.lr_scheduler in ("linear", "cosine") and self.max_steps is None:
            raise ValueError(f"lr_scheduler {self.lr_scheduler} needs max_steps, to know when the rate is to be 0")
        return self

    @model_validator(mode="after")
    def _warms_up_where_it_can(self) -> TrainerConfig:
        if self.warmup_steps and self.lr_scheduler == "constant":
            raise ValueError("warmup_steps needs lr_scheduler constant_with_warmup, linear or cosine")
        return self

    @model_validator(mode="after")
    def _tells_agents_apart(self) -> TrainerConfig:
        if self.agent_credit == "own" and set(self.agents or ()) <= {"*"}:
            raise ValueError("agent_credit own needs agents to be named, as in agents: [planner, writer]")
        return self

    @model_validator(mode="after")
    def _has_a_level_for_its_loss(self) -> TrainerConfig:
        if self.loss_type == "luspo" and self.importance_level != "sequence":
            raise ValueError("loss_type luspo is a loss of whole answers: it needs importance_level: sequence")
        if self.loss_type == "vespo" and self.importance_level != "token":
            raise ValueError("loss_type vespo weighs whole answers by itself: it needs importance_level: token")
        return self

    @property
    def judged(self) -> bool:
        """Whether any call is scored by a judge."""
        return "judge" in ([self.credit] if isinstance(self.credit, str) else self.credit.values())

    @property
    def credit_by_agent(self) -> list[str]:
        """The agents that have a strategy by name."""
        return [] if isinstance(self.credit, str) else [agent for agent in self.credit if agent != "*"]

    @property
    def failed_reward(self) -> float | None:
        """What a failed rollout counts for; None: it is dropped."""
        return {"drop": None, "zero": 0.0}[value] if isinstance(value := self.failed_rollouts, str) else value

    @model_validator(mode="after")
    def _has_a_judge(self) -> TrainerConfig:
        if self.judged and self.judge.model is None:
            raise ValueError("credit judge needs judge.model, as litellm names it (openai/gpt-4o-mini)")
        return self

    @model_validator(mode="after")
    def _counts_some_reward(self) -> TrainerConfig:
        if not any(self.reward_weights.values()):
            raise ValueError("reward_weights: at least one name needs a weight other than 0")
        return self


class Config(Section):
    proxy: ProxyConfig = ProxyConfig()
    store: StoreConfig = StoreConfig()
    upstreams: list[UpstreamConfig] = [UpstreamConfig(name="policy", base_url="http://127.0.0.1:8100/v1")]
    recording: RecordingConfig = RecordingConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    policy: PolicyConfig = PolicyConfig()
    vllm: VllmConfig = VllmConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _has_an_upstream(self) -> Config:
        if not self.upstreams:
            raise ValueError("upstreams: at least one is needed")
        check_fallbacks({upstream.name: upstream.fallbacks for upstream in self.upstreams}, len(self.upstreams))
        return self

    def keys(self) -> list[str]:
        """Every key that the configuration holds: ours and the upstreams'."""
        headers = self.telemetry.otlp_headers.values()
        ours = [key.get_secret_value() for key in (*self.proxy.api_keys, *self.proxy.admin_keys, *headers)]
        return [*ours, *(secret for upstream in self.upstreams for secret in upstream.secrets())]


def _is_sendable(key: SecretStr) -> bool:
    """Whether a header can carry it, and nothing else is read as it."""
    text = key.get_secret_value()
    return text != "" and text.isascii() and text.isprintable() and " " not in text


def _secret_texts(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, str) and secret:
        yield value
        yield value.rpartition(" ")[2]  # without its scheme, as in "Bearer …"
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _secret_texts(inner, secret=secret or _SECRET_NAME.search(str(name)) is not None)
    for inner in value if isinstance(value, list) else ():
        yield from _secret_texts(inner, secret=secret)


def check_fallbacks(fallbacks: Mapping[str, Sequence[str]], upstreams: int) -> None:
    """Raise ValueError unless names are unique, every fallback is one of them, and none leads back to itself."""
    if len(fallbacks) < upstreams:
        raise ValueError("upstreams: every one needs a name of its own")
    for name, following in fallbacks.items():
        for other in following:
            if other not in fallbacks:
                raise ValueError(f"upstreams: {name} falls back to {other!r}, which is no upstream")
    try:
        TopologicalSorter(fallbacks).prepare()
    except CycleError as error:
        raise ValueError(f"upstreams: fallbacks go in a circle: {' -> '.join(reversed(error.args[1]))}") from None
