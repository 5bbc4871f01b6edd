"""Settles what the configuration leaves to the memory plan: lengths, sizes of passes, shares of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from ...core.config.root import Config
from ...serving.mode import publish_mode
from ..rate import Rate, rate_of
from .machine import Cards, cards, machine_memory, model_config
from .memory import Adapter
from .plan import Plan, PlanRequest, pass_on_cpu, plan
from .shape import DecoderShape, check_model, shape_of

# Where there is no plan, since the model's sizes are not known; the most in any case on a CPU.
TOKENS_PER_PASS = 8192
# A larger pass is no faster on a CPU.
COMFORTABLE_ON_CPU = 1024
UTILIZATION = 0.5
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Settled:
    """A configuration in which no such key is null, and the plan that it is from (None: there is none, or no GPU).

    `vllm_devices` and `trainer_devices` are the numbers of the GPUs that each may see; empty: all. `rate` comes
    with the plan.
    """

    config: Config
    plan: Plan | None = None
    vllm_devices: tuple[int, ...] = ()
    trainer_devices: tuple[int, ...] = ()
    rate: Rate | None = None


def settle(
    config: Config, gpus: Cards | None = None, *, offline: bool = False, trained: bool = True, sharded: bool = False
) -> Settled:
    """Return the configuration with every null decided for `gpus`, by default those of this machine.

    An `offline` trainer has no vLLM beside it, and neither has one whose vLLM is on another machine. If not `trained`,
    or if a service takes the steps, vLLM has no trainer beside it. There is no plan for a base model that is `sharded`
    over several GPUs, and on a CPU only for the size of a pass. ConfigError if the model cannot be trained, or does not
    fit.
    """
    gpus = cards() if gpus is None else gpus
    trained = trained and config.trainer.trains_here
    about = model_config(config.policy.model, download=bool(gpus)) if config.policy.model else None
    if about is not None:
        check_model(about)
    shape = shape_of(about) if about is not None else None
    if shape is None or not gpus or sharded:
        on_cpu = None if gpus or sharded or not trained else shape
        without = _without_plan(config, on_cpu, served=not offline and _is_here(config))
        return Settled(without, None, tuple(config.vllm.devices), tuple(config.trainer.devices))
    numbers = list(gpus)
    found = plan(shape, list(gpus.values()), replace(_wanted(config, numbers, offline), trained=trained))
    return Settled(
        _filled(config, found),
        found,
        tuple(numbers[i] for i in found.vllm_devices),
        tuple(numbers[i] for i in found.trainer_devices),
        rate_of(config.trainer, shape.hidden),
    )


def _wanted(config: Config, numbers: list[int], offline: bool) -> PlanRequest:
    vllm, trainer, adapters = config.vllm, config.trainer, 1 + len(config.policy.adapters)
    lora = publish_mode(config) == "lora"
    places = {number: place for place, number in enumerate(numbers)}
    return PlanRequest(
        max_model_len=vllm.max_model_len,
        utilization=vllm.gpu_memory_utilization,
        tokens_per_pass=trainer.max_tokens_per_batch,
        max_sample_tokens=trainer.max_sample_tokens,
        vllm_devices=tuple(places.get(number, len(numbers)) for number in vllm.devices) or None,
        trainer_devices=tuple(places.get(number, len(numbers)) for number in trainer.devices) or None,
        checkpointing=trainer.gradient_checkpointing is not False,
        served=not offline and _is_here(config),
        adapter=Adapter(trainer.lora_rank, adapters, vllm.max_loras * adapters if lora else 0),
        full=trainer.weights == "full",
        reference=bool(trainer.kl_coef) or trainer.kl_metric,
    )


def _is_here(config: Config) -> bool:
    upstream = config.policy_upstream
    return upstream is None or urlsplit(upstream.published_to[0]).hostname in LOOPBACK


def _filled(config: Config, found: Plan) -> Config:
    return _with(
        config,
        {"max_model_len": found.max_model_len, "gpu_memory_utilization": found.utilization},
        {"max_tokens_per_batch": found.tokens_per_pass, "max_sample_tokens": found.max_sample_tokens},
    )


def _without_plan(config: Config, on_cpu: DecoderShape | None, *, served: bool) -> Config:
    vllm, trainer = config.vllm, config.trainer
    sample, checkpointing, tokens = (
        trainer.max_sample_tokens or vllm.max_model_len,
        trainer.gradient_checkpointing,
        None,
    )
    if on_cpu is not None:
        wanted = PlanRequest(
            max_sample_tokens=sample, checkpointing=checkpointing is True, served=served,
            adapter=Adapter(trainer.lora_rank, 1 + len(config.policy.adapters)),
            full=trainer.weights == "full", reference=bool(trainer.kl_coef) or trainer.kl_metric,
        )  # fmt: skip
        tokens, needed = pass_on_cpu(on_cpu, machine_memory(), wanted, vllm.kv_cache_gib, TOKENS_PER_PASS)
        checkpointing = True if needed and checkpointing == "auto" else checkpointing
    return _with(
        config,
        {"gpu_memory_utilization": vllm.gpu_memory_utilization or UTILIZATION},
        {
            "max_tokens_per_batch": trainer.max_tokens_per_batch or tokens or TOKENS_PER_PASS,
            "max_sample_tokens": sample,
            "gradient_checkpointing": checkpointing,
        },
    )


def _with(config: Config, vllm: dict[str, object], trainer: dict[str, object]) -> Config:
    return config.model_copy(
        update={"vllm": config.vllm.model_copy(update=vllm), "trainer": config.trainer.model_copy(update=trainer)}
    )
