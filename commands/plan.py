"""`plan`: shows how GPU memory would be divided, and which settings follow from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..core.config.root import Config
from ..core.errors import ConfigError, LightningError
from ..trainer.plan import Plan, cards, cards_like, make_plan, model_config, shape_of
from .formats import count, print_json, print_view, table
from .vllm import require_model


def plan_command(config: Config, gpus: str | None, *, as_json: bool) -> None:
    """Print the plan. Raises LightningError if no GPU is known, ConfigError if the model is unknown or does not fit."""
    model = require_model(config)
    machine = cards_like(gpus) if gpus else cards()
    if not machine:
        raise LightningError("there is no GPU here (nvidia-smi): describe one, as in --gpus 1x24")
    about = model_config(model)
    if about is None or shape_of(about) is None:
        raise ConfigError(f"policy.model: the config.json of {model} cannot be read, or lacks sizes like hidden_size")
    if gpus and config.policy.publish == "auto" and config.trainer.weights == "lora":
        policy = config.policy.model_copy(update={"publish": "lora"})  # what auto means on a GPU
        config = config.model_copy(update={"policy": policy})
    plan = make_plan(config, machine)
    if not as_json:
        print_view(*plan_tables(plan))
        return
    print_json({
        "settings": {key: value for key, value, _ in _settings(plan)},
        "kv_cache_tokens": plan.kv_tokens,
        "cards_gib": list(plan.cards.values()),
        "vllm_gib": {name: round(gib, 2) for name, gib in plan.vllm.items()},
        "trainer_gib": {name: round(gib, 2) for name, gib in plan.trainer.items()},
        "model": model,
    })  # fmt: skip


def plan_tables(plan: Plan) -> tuple[Table, Table]:
    """Return a table of memory per card, in GiB, and a table of settings."""
    memory = table("GiB a card", right=("vLLM", "trainer"), padding=(0, 2), pad_edge=True)
    for name in dict.fromkeys((*plan.vllm, *plan.trainer)):
        memory.add_row(name, *(f"{side[name]:.1f}" if name in side else "" for side in (plan.vllm, plan.trainer)))
    memory.add_row("together", *(f"{sum(side.values()):.1f}" for side in (plan.vllm, plan.trainer)), style="bold")
    settings = Table(box=None, padding=(0, 2), show_header=False)
    for key, value, meaning in _settings(plan):
        settings.add_row(key, ", ".join(map(str, value)) if isinstance(value, list) else str(value), meaning)
    return memory, settings


def _settings(plan: Plan) -> list[tuple[str, Any, str]]:
    vllm, trainer = plan.config.vllm, plan.config.trainer

    def gib(devices: Sequence[int]) -> str:
        return f"{min(plan.cards[n] for n in devices):.0f} GiB" if devices else ""

    rows: list[tuple[str, Any, str]] = [
        ("vllm.devices", list(plan.vllm_devices), gib(plan.vllm_devices)),
        ("vllm.max_model_len", vllm.max_model_len, f"{count(plan.kv_tokens)} tokens fit into the KV cache"),
        ("vllm.gpu_memory_utilization", vllm.gpu_memory_utilization, ""),
        ("trainer.devices", list(plan.trainer_devices), gib(plan.trainer_devices)),
        ("trainer.max_tokens_per_batch", trainer.max_tokens_per_batch, "tokens a pass"),
        ("trainer.max_sample_tokens", trainer.max_sample_tokens, ""),
    ]
    return rows + ([("trainer.learning_rate", plan.rate.value, plan.rate.reason)] if plan.rate else [])
