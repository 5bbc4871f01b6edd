"""A model's sizes, read from its config.json, and the bytes that a server and a trainer need for it. Arithmetic only.

On a GPU activations are bfloat16 beside float32 where it matters; on a CPU everything is float32.

The trainer's pass is checked against runs on tensors without values (tests/trainer/plan). What vLLM and CUDA take for
themselves is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError

GIB = 2**30
BF16, FLOAT32 = 2, 4

# CUDA's own memory in a process, with its libraries.
CONTEXT = 0.7 * GIB

# vLLM's activations, CUDA graphs and buffers.
SERVING = 1.6 * GIB

# Of all that the trainer asks for, the allocator loses about so much in pieces that nothing fits into.
LOSS = 0.04

# On a CPU, glibc's heap grows to so many times what a pass takes, as measured with passes of 6,900 tokens.
HEAP = 1.6

# The logits of a piece of a pass: 2**24 in float32, and tensors computed from them.
LOGITS = 6 * 2**24 * FLOAT32

# Models whose configurations list no layer types: layers have a state that runs through the row, or other attention.
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


@dataclass(frozen=True, slots=True)
class Adapter:
    """The LoRA adapters: their rank, how many the trainer has, and for how many vLLM keeps room."""

    rank: int = 16
    trained: int = 1
    served: int = 4


def weights(shape: DecoderShape) -> float:
    """Return the bytes of the base model in bfloat16."""
    return BF16 * shape.parameters


def master_weights(shape: DecoderShape, *, reference: bool = False) -> float:
    """Return the bytes of weights that are all trained (float32); a frozen `reference` beside them is in bfloat16."""
    return (FLOAT32 + BF16 * reference) * shape.parameters


def full_gradients(shape: DecoderShape) -> float:
    """Return the bytes of their gradients and of AdamW's two moments."""
    return 3 * FLOAT32 * shape.parameters


def kv_cache(shape: DecoderShape, tokens: int) -> float:
    """Return the bytes of the keys and values of so many tokens."""
    return 2 * BF16 * shape.layers * shape.keys * tokens


def served_adapters(shape: DecoderShape, adapter: Adapter) -> float:
    return BF16 * adapter.served * shape.lora_parameters(adapter.rank)


def trained_adapters(shape: DecoderShape, adapter: Adapter) -> float:
    """Return the bytes of weights, gradients (twice: a pass adds its own when it is done) and AdamW's two moments."""
    return 5 * FLOAT32 * adapter.trained * shape.lora_parameters(adapter.rank)


def training_pass(shape: DecoderShape, tokens: int, *, checkpointing: bool = True, width: int = BF16) -> float:
    """Return the bytes that a forward and backward pass over so many tokens takes at its peak, besides the weights.

    With checkpointing, each layer's input is kept, and one layer at a time is computed again. `width`: bytes of an
    activation.
    """
    ends = width * 4 * shape.hidden  # the embeddings, the last layer's output, and the gradients of both
    if checkpointing:
        a_token = shape.layers * width * shape.hidden + ends + _layer(shape, width) + _mlp_gradients(shape)
    else:
        a_token = shape.layers * _layer(shape, width) + ends
    return max(a_token * tokens, (shape.layers * width * shape.hidden + ends) * tokens + LOGITS)


def full_pass(shape: DecoderShape, tokens: int, *, checkpointing: bool = True) -> float:
    """Return what a pass takes if all weights are trained, besides these and their gradients.

    Without checkpointing it keeps all weights in bfloat16. In the end there is the gradient of the head, twice.
    """
    kept = 0 if checkpointing else BF16 * shape.parameters
    head = 2 * FLOAT32 * shape.vocabulary * shape.hidden
    return max(training_pass(shape, tokens, checkpointing=checkpointing) + kept, head)


def _layer(shape: DecoderShape, width: int) -> float:
    """The bytes that a layer keeps for its backward pass, of one token.

    Norms keep their input in float32, a copy where activations are narrower; each adapted module keeps its input; the
    MLP keeps four times its width.
    """
    norms = 2 * FLOAT32 * shape.hidden if width < FLOAT32 else 0
    inputs = width * (5 * shape.hidden + shape.attention)
    attention = width * (2 * shape.attention + 2 * shape.keys)
    heads = FLOAT32 * (shape.attention + shape.keys) if shape.normed_heads else 0
    return norms + inputs + attention + heads + 4 * width * shape.intermediate * shape.active


def _mlp_gradients(shape: DecoderShape) -> float:
    """The bytes of the gradients in the middle of the MLP's backward pass, of one token: twice in float32."""
    return 2 * FLOAT32 * shape.intermediate * shape.active
