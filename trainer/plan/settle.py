"""Fills in what the configuration leaves to the memory plan, on a machine: lengths, sizes of passes, shares of GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...serving.mode import publish_mode
from ..rate import Rate, rate_of
from .memory import GIB, Adapter, DecoderShape, check_model, shape_of
from .plan import Plan, PlanRequest, pass_on_cpu, plan

# Where there is no plan, since the model's sizes are not known; the most in any case on a CPU.
TOKENS_PER_PASS = 8192

# A larger pass is no faster on a CPU.
COMFORTABLE_ON_CPU = 1024
UTILIZATION = 0.5
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ASKING_S = 20.0
ASK = ("nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits")

# Of cgroups, versions 2 and 1.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
Cards = dict[int, float]


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


def cards() -> Cards:
    """Return the memory of each visible GPU in GiB, by its number; nothing without nvidia-smi."""
    if shutil.which(ASK[0]) is None:
        return {}
    try:
        listing = subprocess.run(ASK, check=True, capture_output=True, text=True, timeout=ASKING_S).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {int(index): float(mib) / 1024 for index, mib in re.findall(r"^(\d+), *([\d.]+)", listing, re.MULTILINE)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return {int(n): found[int(n)] for n in visible.split(",") if n.strip().isdigit() and int(n) in found}


def machine_memory() -> float:
    """Return this machine's memory in GiB, or what its container may use of it."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # another kernel; `max`
            limits.append(float(Path(file).read_text()))
    return min(limits) / GIB


def cards_like(text: str) -> Cards:
    """Return the cards that `8x80` describes: eight GPUs of 80 GiB. `24` is one card; `1x24,1x48` are two."""
    found: list[float] = []
    for part in text.lower().split(","):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)", part.strip())
        if match is None or not float(match[2]):
            raise ConfigError(f"--gpus: {text!r} is not like 1x24 or 8x80 (cards x GiB of each)")
        found += [float(match[2])] * int(match[1] or 1)
    if not found:
        raise ConfigError(f"--gpus: {text!r} has no card")
    return dict(enumerate(found))


def model_config(model: str, *, download: bool = True) -> dict[str, Any] | None:
    """Return the model's config.json, from its directory or from the hub; None if it cannot be had.

    Without `download`, only what was fetched before is looked at.
    """
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else _from_hub(model, download)
    try:
        found = json.loads(file.read_text()) if file else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _from_hub(model: str, download: bool) -> Path | None:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        return Path(hf_hub_download(model, "config.json")) if download else None
    except Exception:  # no such package, no network, no such model: loading the model gives a better message
        return None
