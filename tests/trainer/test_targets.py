"""LoRA goes on attention and MLP of the language model: not on experts, routers and vision towers, unless named."""

from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_proxy.trainer.weights import language_targets, lora_config
from support.sections import TrainerConfig

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


def trained(model: PreTrainedModel, targets: Any) -> list[str]:
    """The names of what is trained of an adapted model."""
    adapted = get_peft_model(model, lora_config(TrainerConfig(lora_targets=targets), model))
    return [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral", "llama4_text"])
def test_experts_and_routers_get_none(kind: str) -> None:
    dense = kind in ("llama", "qwen3")
    assert language_targets(language_model(kind, num_hidden_layers=2)) == (DENSE if dense else ATTENTION)


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "qwen3"])
def test_of_a_dense_language_model_every_linear_module_but_the_head_gets_one(kind: str) -> None:
    layers = {"n_layer": 2} if kind == "gpt2" else {"num_hidden_layers": 2}
    language, linear = (trained(language_model(kind, **layers), which) for which in ("language", "all-linear"))
    assert set(language) == set(linear) != set()


@pytest.mark.parametrize("name", ["Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_a_vision_tower_gets_none_unless_it_is_named(name: str) -> None:
    kind = "qwen2_5_vl" if name.startswith("Qwen") else "gemma3"
    language = trained(vision_model(kind, name), "language")
    assert len(language) == 2 * 2 * len(DENSE)  # A and B of two layers
    assert all("language_model.layers." in one for one in language)
    assert any("vis" in one for one in trained(vision_model(kind, name), "all-linear"))
