"""The plan and the learning rate: chosen where the configuration says nothing, and refused in one line if unfit."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer import plan as plan_module
from lightning_proxy.trainer.plan import Plan, cards, cards_like, check_model, make_plan
from lightning_proxy.trainer.rate import Rate, automatic_rate, rate_of
from support.models import SIZES
from support.sections import TrainerConfig


def planned(tmp_path: Path, name: str, gpus: str, **sections: dict[str, Any]) -> Plan:
    (tmp_path / "config.json").write_text(json.dumps(SIZES[name]))
    policy = {"model": str(tmp_path), "publish": "lora"}
    return make_plan(Config.model_validate({"policy": policy, **sections}), cards_like(gpus) if gpus else {})


@pytest.mark.parametrize(
    ("name", "gpus", "vllm", "trainer"),
    [
        ("Qwen3-8B", "1x80", (0,), (0,)),
        ("Qwen2.5-7B", "2x24", (0,), (1,)),
        ("Qwen3-32B", "8x80", (0, 1, 2, 3), (7,)),
    ],
)
def test_what_is_planned_fits(tmp_path: Path, name: str, gpus: str, vllm: Any, trainer: Any) -> None:
    plan = planned(tmp_path, name, gpus)
    assert (plan.vllm_devices, plan.trainer_devices) == (vllm, trainer)
    share, longest = plan.config.vllm.gpu_memory_utilization, plan.config.vllm.max_model_len
    card, sides = plan.cards[0], (sum(plan.vllm.values()), sum(plan.trainer.values()))
    assert (sum(sides) if plan.shared else max(sides)) <= 0.98 * card
    assert share is not None and sides[0] == pytest.approx(share * card, rel=0.03)
    assert longest is not None and 4096 <= longest == plan.config.trainer.max_sample_tokens
    assert plan.kv_tokens >= 2 * longest


def test_a_share_of_vllms_that_is_configured_leaves_the_trainer_the_rest(tmp_path: Path) -> None:
    plan = planned(tmp_path, "Qwen3-4B", "1x24", vllm={"gpu_memory_utilization": 0.55})
    assert plan.shared and sum(plan.trainer.values()) + 0.55 * 24 <= 24


def test_gpus_go_to_those_that_they_are_configured_for(tmp_path: Path) -> None:
    found = planned(tmp_path, "Qwen3-4B", "4x24", vllm={"devices": [2, 3]}, trainer={"devices": [0]})
    assert (found.vllm_devices, found.trainer_devices) == ((2, 3), (0,))
    with pytest.raises(ConfigError, match="there is no GPU"):
        planned(tmp_path, "Qwen3-4B", "1x24", vllm={"devices": [1]})


def test_what_cannot_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, gpus, said in (
        ("Qwen2.5-7B", "1x24", {}),
        ("Qwen3-32B", "1x80", {}),
        ("Qwen3-4B", "1x24", {"vllm": {"max_model_len": 40960}}),
        ("Qwen3-4B", "1x24", {"vllm": {"gpu_memory_utilization": 0.7}}),
        ("Qwen3-4B", "1x24", {"trainer": {"gradient_checkpointing": False, "max_tokens_per_batch": 8192}}),
    ):
        with pytest.raises(ConfigError, match="does not fit") as refused:
            planned(tmp_path, name, gpus, **said)
        assert "\n" not in refused.value.message


def test_without_a_gpu_or_sizes_there_are_defaults(tmp_path: Path) -> None:
    config = make_plan(Config.model_validate({"vllm": {"max_model_len": 300}}), {}).config
    assert (config.trainer.max_tokens_per_batch, config.trainer.max_sample_tokens) == (8192, 300)
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    found = make_plan(Config.model_validate({"policy": {"model": str(tmp_path)}}), cards_like("24"))
    assert not found.cards and found.config.vllm.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("gib", "tokens", "checkpointing"), [(64.0, 2048, "auto"), (32.0, 8192, True), (24.0, 2048, True), (8.0, 1, True)]
)
def test_without_a_gpu_the_machines_memory_bounds_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, tokens: int, checkpointing: bool | str
) -> None:
    monkeypatch.setattr(plan_module, "machine_memory", lambda: gib)
    vllm = {"max_model_len": 2048, "kv_cache_gib": 2}
    trainer = planned(tmp_path, "Qwen2.5-1.5B", "", vllm=vllm).config.trainer
    assert (trainer.max_tokens_per_batch, trainer.gradient_checkpointing) == (tokens, checkpointing)
    own = {"max_tokens_per_batch": 512, "gradient_checkpointing": False}
    kept = planned(tmp_path, "Qwen2.5-1.5B", "", vllm=vllm, trainer=own).config.trainer
    assert (kept.max_tokens_per_batch, kept.gradient_checkpointing) == (512, False)


def test_a_model_that_is_known_not_to_train_is_refused_by_name() -> None:
    models: list[tuple[str, dict[str, Any]]] = [
        ("awq", {"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}),
        ("linear_attention", {"model_type": "next", "layer_types": ["linear_attention", "full_attention"]}),
        ("jamba", {"model_type": "jamba"}),
        ("attention sinks", {"model_type": "gpt_oss", "layer_types": ["sliding_attention"]}),
        ("encoder", {"model_type": "t5", "is_encoder_decoder": True}),
        ("linear_attention", {"model_type": "vl", "text_config": {"layer_types": ["linear_attention"]}}),
    ]
    for named, config in models:
        with pytest.raises(ConfigError, match=named):
            check_model(config)


def test_cards_are_those_that_we_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A played nvidia-smi: there is no GPU here."""
    monkeypatch.setattr(plan_module, "ASK", ("printf", r"0, 24564\n3, 81920\n"))
    assert cards() == {0: 24564 / 1024, 3: 80.0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert list(cards()) == [3]
    monkeypatch.setattr(plan_module, "ASK", ("no-such-program",))
    assert cards() == {}


WIDTH = 576  # SmolLM2-135M


@pytest.mark.parametrize(
    ("width", "lora", "full"),
    [
        (WIDTH, 2.0e-4, 1.3e-5),  # 2000 / 576 = 3.472; ln 1.245; times 0.781 0.972; e^0.972 = 2.644
        (4096, 4.3e-5, 2.9e-6),  # 2000 / 4096 = 0.488; ln -0.717; times 0.781 -0.560; e^-0.560 = 0.571
    ],
)
def test_the_rate_falls_with_the_width_and_is_smaller_for_all_weights(width: int, lora: float, full: float) -> None:
    assert (automatic_rate(width), automatic_rate(width, "full")) == (lora, full)


def test_a_rate_says_what_it_is_for_and_a_checkpoints_counts_until_one_is_set() -> None:
    lora, full = TrainerConfig(), TrainerConfig(weights="full")
    assert rate_of(lora, WIDTH) == Rate(2e-4, "`auto` for LoRA of rank 16 and alpha 32 at width 576")
    assert rate_of(full, WIDTH) == Rate(1.3e-5, "`auto` for all weights at width 576")
    kept = rate_of(lora, WIDTH, kept=1e-5)
    assert kept.value == 1e-5 and "the checkpoint's" in kept.reason and "0.0002" in kept.reason
    assert rate_of(TrainerConfig(learning_rate=3e-5), WIDTH, kept=1e-5).value == 3e-5
    assert rate_of(lora, WIDTH, kept=2e-4) == rate_of(lora, WIDTH)
