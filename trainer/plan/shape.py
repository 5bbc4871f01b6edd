"""The sizes of a model, read from its config.json, and the models that are refused before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError

# Their configurations list no layer types: layers have a state that runs through the row, or other attention.
_RECURRENT = ("mamba", "rwkv", "jamba", "bamba", "zamba", "falcon_h1", "nemotron_h", "recurrent_gemma", "hybrid")
_SINKS = ("gpt_oss",)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder. `experts` is how many MLPs a layer has; a token goes through `active` of them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool = False
    normed_heads: bool = False
    experts: int = 1
    active: int = 1

    @property
    def attention(self) -> int:
        """Return the width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Return the width of all keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one layer, without norms and biases."""
        mlp = 3 * self.hidden * self.intermediate * self.experts
        return self.hidden * (2 * self.attention + 2 * self.keys) + mlp

    @property
    def parameters(self) -> int:
        """Return the number of parameters; norms and biases are too few to count."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of an adapter on attention and MLP; on experts there is none."""
        attention = 4 * self.hidden + 2 * self.attention + 2 * self.keys
        mlp = 3 * (self.hidden + self.intermediate) if self.experts == 1 else 0
        return self.layers * rank * (attention + mlp)


def check_model(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model that the trainer is known not to train."""
    kind, text = str(config.get("model_type", "")), _text(config)
    if quantisation := config.get("quantization_config"):
        how = quantisation.get("quant_method", "quantised")
        raise ConfigError(f"policy.model: its weights are quantised ({how}); train the model that they were made of")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"policy.model: {kind} has an encoder; only decoders are trained")
    others = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if others or any(part in kind for part in _RECURRENT):
        layers = ", ".join(sorted(others)) or "a recurrent kind"
        raise ConfigError(f"policy.model: {kind} has layers of {layers}; only attention is trained")
    if kind in _SINKS:
        raise ConfigError(f"policy.model: {kind} has attention sinks, which are not supported")


def shape_of(config: Mapping[str, Any]) -> DecoderShape | None:
    """Return the sizes in a config.json; None if it lacks some, as those of unusual models do."""
    text = _text(config)
    try:
        heads = int(text["num_attention_heads"])
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 1)
        return DecoderShape(
            layers=int(text["num_hidden_layers"]),
            hidden=int(text["hidden_size"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
            intermediate=int((text.get("moe_intermediate_size") if experts > 1 else None) or text["intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            context=int(text["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            normed_heads=str(text.get("model_type", "")).startswith(("qwen3", "gemma3", "olmo2")),
            experts=experts,
            active=int(text.get("num_experts_per_tok") or 1),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model."""
    found = config.get("text_config")
    return found if isinstance(found, Mapping) else config
