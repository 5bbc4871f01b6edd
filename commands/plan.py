"""`plan`: shows how the memory of GPUs is shared out, for this machine or one that one does not have."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..core.config.root import Config
from ..core.errors import ConfigError, LightningError
from ..trainer.plan.memory import GIB, shape_of
from ..trainer.plan.plan import Plan
from ..trainer.plan.settle import Settled, cards, cards_like, model_config, settle
from .formats import count, print_json
from .vllm import require_model


def plan_command(config: Config, gpus: str | None, *, as_json: bool) -> None:
    """Print the plan; LightningError if there is no GPU to plan for, ConfigError if nothing fits."""
    model = require_model(config)
    machine = cards_like(gpus) if gpus else cards()
    if not machine:
        raise LightningError("there is no GPU here (nvidia-smi): describe one, as in --gpus 1x24")
    about = model_config(model)
    if about is None or shape_of(about) is None:
        raise ConfigError(f"policy.model: the sizes of {model} cannot be read from its config.json")
    if gpus and config.policy.publish == "auto" and config.trainer.weights == "lora":
        policy = config.policy.model_copy(update={"publish": "lora"})  # what auto means on a GPU
        config = config.model_copy(update={"policy": policy})
    settled = settle(config, machine)
    assert settled.plan is not None
    if as_json:
        print_json(plan_facts(settled))
    else:
        Console(highlight=False).print(*plan_tables(settled), sep="\n")


def plan_facts(settled: Settled) -> dict[str, Any]:
    """Return the plan for programs: the settings by their keys, and GiB by what they are for."""
    config, plan = settled.config, settled.plan
    assert plan is not None
    return {
        "settings": {key: value for key, value, _ in _settings(settled, plan)},
        "kv_cache_tokens": plan.kv_tokens,
        "cards_gib": list(plan.cards),
        "vllm_gib": {name: round(needs / GIB, 2) for name, needs in plan.vllm.items()},
        "trainer_gib": {name: round(needs / GIB, 2) for name, needs in plan.trainer.items()},
        "model": config.policy.model,
    }


def plan_tables(settled: Settled) -> tuple[Table, Table]:
    """Return a table of the memory of one card each, in GiB, and one of the settings."""
    plan = settled.plan
    assert plan is not None
    memory = Table(box=None, padding=(0, 2), title_justify="left")
    for heading, side in (("GiB a card", "left"), ("vLLM", "right"), ("trainer", "right")):
        memory.add_column(heading, justify=side)  # type: ignore[arg-type]
    for name in dict.fromkeys((*plan.vllm, *plan.trainer)):
        memory.add_row(name, _gib(plan.vllm.get(name)), _gib(plan.trainer.get(name)))
    memory.add_row("together", _gib(sum(plan.vllm.values())), _gib(sum(plan.trainer.values())), style="bold")
    settings = Table(box=None, padding=(0, 2), show_header=False)
    for key, value, meaning in _settings(settled, plan):
        settings.add_row(key, ", ".join(map(str, value)) if isinstance(value, list) else str(value), meaning)
    return memory, settings


def plan_line(plan: Plan) -> str:
    """Return the plan in one line."""
    vllm, trainer = (f"{sum(needs.values()) / GIB:.1f} GiB" for needs in (plan.vllm, plan.trainer))
    where = "on one card" if plan.shared else "on cards of their own"
    return (
        f"{f'vLLM {vllm}, trainer {trainer} {where}' if plan.vllm else f'trainer {trainer}'}; "
        f"contexts of {count(plan.max_model_len)} tokens, passes of {count(plan.tokens_per_pass)}"
    )


def _settings(settled: Settled, plan: Plan) -> list[tuple[str, Any, str]]:
    vllm, trainer = settled.config.vllm, settled.config.trainer
    numbers, places = (*settled.vllm_devices, *settled.trainer_devices), (*plan.vllm_devices, *plan.trainer_devices)
    gib = {number: f"{plan.cards[place]:.0f} GiB" for number, place in zip(numbers, places, strict=True)}
    return [
        ("vllm.devices", list(settled.vllm_devices), gib[settled.vllm_devices[0]]),
        ("vllm.max_model_len", vllm.max_model_len, f"{count(plan.kv_tokens)} tokens fit into the KV cache"),
        ("vllm.gpu_memory_utilization", vllm.gpu_memory_utilization, ""),
        ("trainer.devices", list(settled.trainer_devices), gib[settled.trainer_devices[0]]),
        ("trainer.max_tokens_per_batch", trainer.max_tokens_per_batch, "tokens a pass"),
        ("trainer.max_sample_tokens", trainer.max_sample_tokens, ""),
        *([("trainer.learning_rate", settled.rate.value, settled.rate.reason)] if settled.rate else []),
    ]


def _gib(needs: float | None) -> str:
    return "" if needs is None else f"{needs / GIB:.1f}"
