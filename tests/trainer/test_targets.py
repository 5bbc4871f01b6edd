"""LoRA goes on attention and MLP of the language model: not on experts, routers and vision towers, unless named."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from peft import get_peft_model  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from lightning_proxy.trainer.weights import language_targets, lora_config  # noqa: E402
from support.sections import TrainerConfig  # noqa: E402

DENSE = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


def language_model(kind: str, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))


def vision_model(kind: str, name: str) -> PreTrainedModel:
    config = AutoConfig.for_model(kind)
    config.text_config.num_hidden_layers = 2
    config.text_config.layer_types = config.text_config.layer_types[:2]
    with torch.device("meta"):
        model: PreTrainedModel = getattr(transformers, name)(config)
    return model


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", DENSE),
        ("qwen2", DENSE),
        ("qwen3", DENSE),
        ("qwen3_moe", ATTENTION),
        ("mixtral", ATTENTION),
        ("qwen2_moe", ATTENTION),
        ("llama4_text", ATTENTION),
    ],
)
def test_experts_and_routers_get_none(kind: str, expected: list[str]) -> None:
    assert language_targets(language_model(kind, num_hidden_layers=2)) == expected


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "qwen3"])
def test_of_a_dense_language_model_every_linear_module_but_the_head_gets_one(kind: str) -> None:
    layers = {"n_layer": 2} if kind == "gpt2" else {"num_hidden_layers": 2}
    found = []
    for targets in ("language", "all-linear"):
        model = language_model(kind, **layers)
        config = TrainerConfig.model_validate({"lora_targets": targets})
        adapted = get_peft_model(model, lora_config(config, model))
        found.append({name for name, parameter in adapted.named_parameters() if parameter.requires_grad})
    assert found[0] == found[1] != set()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
    ],
)
def test_a_vision_tower_gets_none_unless_it_is_named(kind: str, name: str) -> None:
    model = vision_model(kind, name)
    adapted = get_peft_model(model, lora_config(TrainerConfig(), model))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * len(DENSE)  # A and B of two layers
    assert all("language_model.layers." in name for name in trained)
    model = vision_model(kind, name)
    named = get_peft_model(model, lora_config(TrainerConfig(lora_targets="all-linear"), model))
    assert any("vis" in name for name, parameter in named.named_parameters() if parameter.requires_grad)
