"""Plans the memory of vLLM and the trainer before they start: the context, size of passes, GPUs and vLLM's share.

On a GPU activations are bfloat16, and float32 where it matters; on a CPU everything is float32. The trainer's pass is
checked against runs on meta tensors (tests/trainer/test_pass_memory.py). What vLLM and CUDA take for themselves is an
estimate.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from ..core.config.root import Config
from ..core.errors import ConfigError
from ..serving.mode import publish_mode
from .rate import Rate, rate_of

GIB = 2**30
BF16, FLOAT32 = 2, 4

CONTEXT = 0.7 * GIB  # CUDA's own memory in a process, with its libraries
SERVING = 1.6 * GIB  # vLLM's activations, CUDA graphs and buffers
LOGITS = 6 * 2**24 * FLOAT32  # of a piece of a pass: 2**24, and tensors computed from them

# Lost in pieces that nothing fits into: of all that the trainer asks for; and of a pass on a CPU, by glibc's heap.
LOST, LOST_ON_CPU = 0.04, 0.6

# Of a card, of a card of vLLM's own, and of a machine without a GPU, where other programs run too.
USABLE, ALONE, USABLE_OF_MACHINE = 0.97, 0.9, 0.75
UTILIZATION = 0.5  # where there is no plan

LENGTH_STEP = 1024
MAX_LORAS = 4  # versions that vLLM serves side by side
CONTEXTS = 2  # full contexts that vLLM should hold at once

# The most tokens of a pass where there is room, and on a CPU, where passes of more than 1,024 are no faster.
TOKENS_PER_PASS, COMFORTABLE_ON_CPU = 8192, 1024

# Their configurations list no layer types, and layers have a state that runs through the row, or other attention.
_RECURRENT = ("mamba", "rwkv", "jamba", "bamba", "zamba", "falcon_h1", "nemotron_h", "recurrent_gemma", "hybrid")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ASK = ("nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits")
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroups 2 and 1
Cards = dict[int, float]  # the GiB of GPUs, by their numbers
Needs = dict[str, float]  # by what they are for


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration with the planned sizes, and the GPUs that vLLM and the trainer see (empty: all).

    With GPUs, `vllm` and `trainer` have the GiB that each takes on a card, by purpose. Otherwise they are empty.
    """

    config: Config
    vllm_devices: tuple[int, ...]
    trainer_devices: tuple[int, ...]
    cards: Cards = field(default_factory=dict)
    kv_tokens: int = 0
    vllm: Needs = field(default_factory=dict)
    trainer: Needs = field(default_factory=dict)
    rate: Rate | None = None

    @property
    def shared(self) -> bool:
        """Return whether vLLM and the trainer take memory on the same GPU."""
        return bool(self.vllm) and not {*self.vllm_devices}.isdisjoint(self.trainer_devices)


def make_plan(
    config: Config, gpus: Cards | None = None, *, offline: bool = False, trained: bool = True, sharded: bool = False
) -> Plan:
    """Return the plan with the longest context that fits `gpus` (default: this machine's).

    The trainer has the machine to itself if it is `offline` or publishes to another machine. So does vLLM if nothing is
    `trained`, or if a service takes the steps. A base model of unknown size or `sharded` over GPUs gets default sizes;
    on a CPU, only passes are planned. Raises ConfigError if the model cannot be trained or does not fit the GPUs.
    """
    gpus = cards() if gpus is None else gpus
    about = (model_config(config.policy.model, download=bool(gpus)) if config.policy.model else None) or {}
    check_model(about)
    shape, upstream = None if sharded else shape_of(about), config.policy_upstream
    served = not offline and (upstream is None or urlsplit(upstream.published_to[0]).hostname in LOOPBACK)
    trained = trained and config.trainer.trains_here
    if shape is not None and gpus:
        return _on_gpus(config, shape, gpus, served, trained)
    passes: dict[str, Any] = {"max_tokens_per_batch": TOKENS_PER_PASS, "max_sample_tokens": config.vllm.max_model_len}
    passes |= _on_cpu(config, shape, served) if shape and trained else {}
    filled = _filled(config, {"gpu_memory_utilization": UTILIZATION}, passes)
    return Plan(filled, tuple(config.vllm.devices), tuple(config.trainer.devices))


def _on_gpus(config: Config, shape: DecoderShape, gpus: Cards, served: bool, trained: bool) -> Plan:
    """By default, the trainer gets the last card, and vLLM as many others as it can use. A single card is shared."""
    vllm, trainer = config.vllm, config.trainer
    trainers = tuple(trainer.devices or [*gpus][-1:]) if trained else ()
    others = [number for number in gpus if number not in trainers] or [*gpus][:1]
    servers = tuple(vllm.devices or others[: gcd(shape.kv_heads, 1 << len(others).bit_length() - 1)])
    if missing := {*servers, *trainers} - gpus.keys():
        raise ConfigError(f"vllm.devices, trainer.devices: there is no GPU {min(missing)}, only {[*gpus]}")
    card, is_shared = min(gpus[n] for n in servers), served and not {*servers}.isdisjoint(trainers)
    adapters = MAX_LORAS * (1 + len(config.policy.adapters)) if publish_mode(config) == "lora" else 0
    fixed: Needs = {
        "weights": BF16 * shape.parameters / len(servers) / GIB,
        "adapters": BF16 * adapters * trainer.lora_rank * shape.lora / GIB,
        "CUDA, activations": (CONTEXT + SERVING) / GIB,
    }
    fixed, taken_by_fixed = (fixed, sum(fixed.values())) if served else ({}, 0.0)
    cache_of_a_token = 2 * BF16 * shape.layers * shape.keys / GIB / len(servers)
    longest, contexts = vllm.max_model_len or shape.context, 1 if vllm.max_model_len else CONTEXTS
    shorter = () if vllm.max_model_len else range((longest - 1) // LENGTH_STEP * LENGTH_STEP, 0, -LENGTH_STEP)
    for length, size in product((longest, *shorter), (trainer.max_tokens_per_batch or TOKENS_PER_PASS, 0)):
        tokens = max(trainer.max_tokens_per_batch or size, sample := trainer.max_sample_tokens or length)
        checkpointing = trainer.gradient_checkpointing is not False
        needs = trainer_needs(shape, config, tokens, checkpointing) if trained else {}
        taken, cache = sum(needs.values()), contexts * length * cache_of_a_token
        share = vllm.gpu_memory_utilization or int(100 * (USABLE - taken / card if is_shared else ALONE)) / 100
        room = share * card - taken_by_fixed
        if room >= cache and all(taken <= (USABLE - share * is_shared) * gpus[n] for n in trainers):
            of_vllm = {"max_model_len": length, "gpu_memory_utilization": share}
            filled = _filled(config, of_vllm, {"max_tokens_per_batch": tokens, "max_sample_tokens": sample})
            server = {**fixed, "KV cache": room} if served else {}
            rate = rate_of(trainer, shape.hidden)
            return Plan(filled, servers, trainers, gpus, int(room / cache_of_a_token), server, needs, rate)
    raise ConfigError(
        f"policy.model does not fit: with a context of {length:,} tokens vLLM needs {taken_by_fixed + cache:.0f} "
        f"GiB and the trainer {taken:.0f} GiB, on {'one card' if is_shared else 'cards'} of {card:.0f} GiB; use a "
        "smaller model, more or larger cards, or a sharded base model (docs/gpu.md)"
    )


def _on_cpu(config: Config, shape: DecoderShape, served: bool) -> dict[str, Any]:
    """Return the size of a pass, and turn on gradient checkpointing if that is `auto` and needed."""
    wanted, room = config.trainer.gradient_checkpointing, USABLE_OF_MACHINE * machine_memory()
    if served:
        room -= (FLOAT32 * shape.parameters + SERVING) / GIB + config.vllm.kv_cache_gib

    def fits(tokens: int, checkpointing: bool) -> bool:
        return sum(trainer_needs(shape, config, tokens, checkpointing, on_cpu=True).values()) <= room

    sample, tokens = config.trainer.max_sample_tokens or config.vllm.max_model_len or shape.context, TOKENS_PER_PASS
    needed = wanted == "auto" and not fits(min(sample, tokens), False)
    while tokens > 1 and not fits(tokens, needed or wanted is True):
        tokens //= 2
    return {"max_tokens_per_batch": tokens} | ({"gradient_checkpointing": True} if needed else {})


def _filled(config: Config, vllm: Mapping[str, Any], trainer: Mapping[str, Any]) -> Config:
    sections = {}
    for name, values in (("vllm", vllm), ("trainer", trainer)):
        section = getattr(config, name)
        missing = {key: value for key, value in values.items() if getattr(section, key) in (None, "auto")}
        sections[name] = section.model_copy(update=missing)
    return config.model_copy(update=sections)


# What a model needs ---------------------------------------------------------------------------------------------------


class DecoderShape(NamedTuple):
    """The sizes of a decoder, without norms and biases. `attention`, `keys`: the widths of a token's queries and keys.

    `mlp`: the total width of the MLPs that process a token in a layer. `lora`: the parameters of a rank-1 adapter on
    attention and MLP (experts have none).
    """

    layers: int
    hidden: int
    attention: int
    keys: int
    kv_heads: int
    mlp: int
    vocabulary: int
    context: int
    parameters: int
    lora: int


def shape_of(config: Mapping[str, Any]) -> DecoderShape | None:
    """Return the sizes in a config.json; None if some are missing, as for an unusual model."""
    text = _text(config)
    try:
        layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
        vocabulary, context = text["vocab_size"], text["max_position_embeddings"]
        kv_heads, width = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
        experts = text.get("num_experts") or text.get("num_local_experts") or 1
        mlp = (text.get("moe_intermediate_size") if experts > 1 else None) or text["intermediate_size"]
        attention, keys, active = heads * width, kv_heads * width, text.get("num_experts_per_tok") or 1
        layer = hidden * (2 * attention + 2 * keys) + 3 * hidden * mlp * experts
        lora = 4 * hidden + 2 * attention + 2 * keys + (3 * (hidden + mlp) if experts == 1 else 0)
    except (KeyError, TypeError):
        return None
    ends = 1 if config.get("tie_word_embeddings", text.get("tie_word_embeddings")) else 2
    sizes = (layers, hidden, attention, keys, kv_heads, mlp * active, vocabulary, context)
    return DecoderShape(*sizes, layers * layer + vocabulary * hidden * ends, layers * lora)


def trainer_needs(
    shape: DecoderShape, config: Config, tokens: int, checkpointing: bool, *, on_cpu: bool = False
) -> Needs:
    """Return the GiB that the trainer needs for each purpose, with passes of this many tokens."""
    trainer, width = config.trainer, FLOAT32 if on_cpu else BF16
    if trainer.weights == "full":  # in float32, with gradients and AdamW's two moments; the reference in bfloat16
        of_reference = BF16 if trainer.kl_coef or trainer.kl_metric else 0
        weights = (FLOAT32 + of_reference) * shape.parameters
        needs: Needs = {"weights": weights, "gradients, optimizer": 3 * FLOAT32 * shape.parameters}
    else:
        adapters = (1 + len(config.policy.adapters)) * trainer.lora_rank * shape.lora
        needs = {"weights": width * shape.parameters, "adapters": 4 * FLOAT32 * adapters}
    a_pass = pass_memory(shape, tokens, checkpointing=checkpointing, width=width, full=trainer.weights == "full")
    needs |= {"a pass": a_pass, "CUDA": CONTEXT}
    needs["lost in pieces"] = LOST_ON_CPU * a_pass if on_cpu else LOST * sum(needs.values())
    return {name: size / GIB for name, size in needs.items()}


def pass_memory(
    shape: DecoderShape, tokens: int, *, checkpointing: bool = True, width: int = BF16, full: bool = False
) -> float:
    """Return the bytes that a forward and backward pass takes at its peak, besides weights and their gradients.

    With checkpointing, each layer's input is kept, and one layer at a time is computed again. `width`: bytes of an
    activation. In a layer, norms (including per-head norms) keep their input in float32 (a copy if activations are
    narrower), each adapted module keeps its input, and the MLP keeps four times its width. With `full`, a pass ends
    with two copies of the head's gradient, and without checkpointing keeps a bfloat16 copy of all weights.
    """
    copies = 2 * shape.hidden * (width < FLOAT32) + shape.attention + shape.keys
    layer = width * (5 * shape.hidden + 3 * shape.attention + 2 * shape.keys + 4 * shape.mlp) + FLOAT32 * copies
    ends = width * 4 * shape.hidden  # the embeddings, the last layer's output, and the gradients of both
    inputs = shape.layers * width * shape.hidden + ends
    # The gradients in the middle of the MLP's backward pass are in float32, twice.
    a_token = inputs + layer + 2 * FLOAT32 * shape.mlp if checkpointing else shape.layers * layer + ends
    peak = max(a_token * tokens, inputs * tokens + LOGITS)
    if not full:
        return peak
    copy = 0 if checkpointing or width == FLOAT32 else BF16 * shape.parameters
    return max(peak + copy, 2 * FLOAT32 * shape.vocabulary * shape.hidden)


# What there is --------------------------------------------------------------------------------------------------------


def check_model(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model that the trainer cannot train."""
    kind, quantisation = str(config.get("model_type", "")), config.get("quantization_config") or {}
    others = {*(_text(config).get("layer_types") or ())} - {"full_attention", "sliding_attention"}
    others |= {part for part in _RECURRENT if part in kind}
    problems = {
        f"its weights are quantised ({quantisation.get('quant_method')}) and cannot be trained; use the original, "
        "unquantised model": quantisation,
        f"{kind} has an encoder; only decoder models can be trained": config.get("is_encoder_decoder"),
        f"{kind} has layers of {', '.join(sorted(others))}; only full or sliding-window attention is supported": others,
        f"{kind} has attention sinks, which are not supported": kind == "gpt_oss",
    }
    for problem, there in problems.items():
        if there:
            raise ConfigError(f"policy.model: {problem}")


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def model_config(model: str, *, download: bool = True) -> dict[str, Any] | None:
    """Return the model's config.json, from its directory or from the hub; None if it cannot be read.

    Without `download`, only files fetched earlier are used.
    """
    try:
        if (path := Path(model).expanduser()).is_dir():
            return dict(json.loads((path / "config.json").read_text()))
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json")
        if not isinstance(file, str):
            file = hf_hub_download(model, "config.json", local_files_only=not download)
        return dict(json.loads(Path(file).read_text()))
    except Exception:  # no such package, no network, no such model: loading the model gives a better message
        return None


def cards() -> Cards:
    """Return the memory of each visible GPU in GiB; nothing if nvidia-smi is missing or fails."""
    try:
        listing = subprocess.run(ASK, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    gpus = {int(index): float(mib) / 1024 for index, mib in re.findall(r"^(\d+), *([\d.]+)", listing, re.MULTILINE)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = gpus if visible is None else map(int, re.findall(r"\b\d+\b", visible))
    return {number: gpus[number] for number in wanted if number in gpus}


def cards_like(text: str) -> Cards:
    """Return the cards described by `8x80` (eight of 80 GiB) or `24,48` (two). Raises ConfigError for other forms."""
    gibs: list[float] = []
    for part in text.lower().split(","):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)", part.strip())
        gibs += [float(match[2])] * int(match[1] or 1) if match else [0.0]
    if not gibs or not all(gibs):
        raise ConfigError(f"--gpus: {text!r} is not of the form 1x24 or 8x80 (cards x GiB each)")
    return dict(enumerate(gibs))


def machine_memory() -> float:
    """Return this machine's memory in GiB, or what its container may use of it."""
    limits = [float(psutil.virtual_memory().total)]
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # another kernel; `max`
            limits.append(float(Path(file).read_text()))
    return min(limits) / GIB
