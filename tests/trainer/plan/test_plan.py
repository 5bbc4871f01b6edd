"""The plan chooses what the configuration does not, keeps what it does, and refuses what cannot fit in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.plan import settle as settle_module
from lightning_proxy.trainer.plan.memory import GIB, check_model, shape_of
from lightning_proxy.trainer.plan.plan import PlanRequest, pass_on_cpu
from lightning_proxy.trainer.plan.settle import Settled, cards, cards_like, settle
from support.model_sizes import SIZES


def settled(tmp_path: Path, name: str, gpus: str, **sections: dict[str, Any]) -> Settled:
    (tmp_path / "config.json").write_text(json.dumps(SIZES[name]))
    policy = {"model": str(tmp_path), "publish": "lora"}
    return settle(Config.model_validate({"policy": policy, **sections}), cards_like(gpus))


@pytest.mark.parametrize(
    ("name", "gpus", "vllm", "trainer"),
    [
        ("Qwen2.5-1.5B", "1x24", (0,), (0,)),
        ("Qwen3-4B", "1x24", (0,), (0,)),
        ("Qwen3-8B", "1x80", (0,), (0,)),
        ("Qwen2.5-7B", "2x24", (0,), (1,)),
        ("Qwen3-32B", "8x80", (0, 1, 2, 3), (7,)),
    ],
)
def test_what_is_planned_fits(tmp_path: Path, name: str, gpus: str, vllm: Any, trainer: Any) -> None:
    found = settled(tmp_path, name, gpus)
    assert (found.vllm_devices, found.trainer_devices) == (vllm, trainer)
    plan, config = found.plan, found.config
    assert plan is not None and config.vllm.gpu_memory_utilization is not None
    card = plan.cards[0] * GIB
    both = sum(plan.vllm.values()) + sum(plan.trainer.values())
    assert (both if plan.shared else max(sum(plan.vllm.values()), sum(plan.trainer.values()))) <= 0.98 * card
    assert sum(plan.vllm.values()) == pytest.approx(config.vllm.gpu_memory_utilization * card, rel=0.03)
    assert 4096 <= plan.max_model_len == config.trainer.max_sample_tokens
    assert plan.kv_tokens >= 2 * plan.max_model_len


def test_what_the_configuration_says_is_kept(tmp_path: Path) -> None:
    said = {"vllm": {"max_model_len": 4000, "gpu_memory_utilization": 0.5}, "trainer": {"max_tokens_per_batch": 3000}}
    config = settled(tmp_path, "Qwen3-4B", "1x24", **said).config
    assert (config.vllm.max_model_len, config.vllm.gpu_memory_utilization) == (4000, 0.5)
    assert (config.trainer.max_tokens_per_batch, config.trainer.max_sample_tokens) == (3000, 4000)


def test_all_weights_take_sixteen_bytes_a_parameter_and_a_copy_two_more(tmp_path: Path) -> None:
    plain, compared = (
        settled(tmp_path, "Qwen2.5-1.5B", "1x80", trainer={"weights": "full", "kl_metric": kl}, policy={
            "model": str(tmp_path), "publish": "merged"
        }).plan for kl in (False, True)
    )  # fmt: skip
    assert plain is not None and compared is not None and plain.vllm["adapters"] == 0
    whole = plain.trainer["weights"] + plain.trainer["gradients, optimizer"]
    assert whole == pytest.approx(16 * 1.54e9, rel=0.01)
    assert compared.trainer["weights"] - plain.trainer["weights"] == pytest.approx(2 * 1.54e9, rel=0.01)
    with pytest.raises(ConfigError, match="does not fit"):
        settled(tmp_path, "Qwen3-8B", "1x80", trainer={"weights": "full"}, policy={"model": str(tmp_path)})


@pytest.mark.parametrize("share", [0.5, 0.55])
def test_a_share_of_vllms_that_is_configured_leaves_the_trainer_the_rest(tmp_path: Path, share: float) -> None:
    plan = settled(tmp_path, "Qwen3-4B", "1x24", vllm={"gpu_memory_utilization": share}).plan
    assert plan is not None and plan.shared
    assert sum(plan.trainer.values()) + share * 24 * GIB <= 24 * GIB


def test_gpus_go_to_those_that_they_are_configured_for(tmp_path: Path) -> None:
    found = settled(tmp_path, "Qwen3-4B", "4x24", vllm={"devices": [2, 3]}, trainer={"devices": [0]})
    assert (found.vllm_devices, found.trainer_devices) == ((2, 3), (0,))
    with pytest.raises(ConfigError, match="there is no GPU"):
        settled(tmp_path, "Qwen3-4B", "1x24", vllm={"devices": [1]})


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("Qwen2.5-7B", "1x24", {}),
        ("Qwen3-32B", "1x80", {}),
        ("Qwen3-4B", "1x24", {"vllm": {"max_model_len": 40960}}),
        ("Qwen3-4B", "1x24", {"vllm": {"gpu_memory_utilization": 0.7}}),
        ("Qwen3-4B", "1x24", {"trainer": {"gradient_checkpointing": False, "max_tokens_per_batch": 8192}}),
    ],
)
def test_what_cannot_fit_is_refused_in_one_line(tmp_path: Path, name: str, gpus: str, said: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(tmp_path, name, gpus, **said)
    assert "does not fit" in refused.value.message and "\n" not in refused.value.message


def test_without_a_gpu_or_sizes_there_are_defaults(tmp_path: Path) -> None:
    config = settle(Config.model_validate({"vllm": {"max_model_len": 300}}), {}).config
    assert (config.trainer.max_tokens_per_batch, config.trainer.max_sample_tokens) == (8192, 300)
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    found = settle(Config.model_validate({"policy": {"model": str(tmp_path)}}), cards_like("24"))
    assert found.plan is None and found.config.vllm.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("gib", "tokens", "checkpointing"),
    [(64.0, 3900, False), (32.0, 8192, True), (24.0, 2700, True), (8.0, 1, True)],
)
def test_without_a_gpu_the_machines_memory_bounds_a_pass(gib: float, tokens: int, checkpointing: bool) -> None:
    shape = shape_of(SIZES["Qwen2.5-1.5B"])
    assert shape is not None
    found, needed = pass_on_cpu(shape, gib, PlanRequest(max_sample_tokens=2048, checkpointing=False), 2.0, 8192)
    assert (found, needed) == (pytest.approx(tokens, rel=0.1), checkpointing)


def test_settings_for_a_machine_without_a_gpu_fit_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_module, "machine_memory", lambda: 24.0)
    (tmp_path / "config.json").write_text(json.dumps(SIZES["Qwen2.5-1.5B"]))
    sections = {"policy": {"model": str(tmp_path)}, "vllm": {"max_model_len": 2048}}
    trainer = settle(Config.model_validate(sections), {}).config.trainer
    assert trainer.gradient_checkpointing is True and 2048 < trainer.max_tokens_per_batch < 8192
    own = {"max_tokens_per_batch": 512, "gradient_checkpointing": False}
    kept = settle(Config.model_validate({**sections, "trainer": own}), {}).config.trainer
    assert (kept.max_tokens_per_batch, kept.gradient_checkpointing) == (512, False)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "jamba"}, "jamba"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention"]}, "attention sinks"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"model_type": "vl", "text_config": {"layer_types": ["linear_attention"]}}, "linear_attention"),
    ],
)
def test_a_model_that_is_known_not_to_train_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_model(config)


def test_cards_are_those_that_we_may_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A played nvidia-smi: there is no GPU here."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0, 24564\\n3, 81920\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cards() == {0: 24564 / 1024, 3: 80.0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert list(cards()) == [3]
    monkeypatch.setattr(settle_module, "ASK", ("no-such-program",))
    assert cards() == {}


def test_cards_that_one_does_not_have_are_described() -> None:
    assert list(cards_like("2x24,80").values()) == [24, 24, 80]
    for wrong in ("many", "8x", "", "1x0"):
        with pytest.raises(ConfigError, match="--gpus"):
            cards_like(wrong)
