"""Shares out the memory of the GPUs, or of a machine without any, between vLLM and the trainer before either starts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import ConfigError
from . import memory
from .memory import GIB, Adapter, DecoderShape

# Of a card's memory so much is shared out; of a card of vLLM's own, vLLM gets so much.
USABLE, ALONE = 0.97, 0.9
LENGTH_STEP = 1024
LEAST_LENGTH = 1024
# vLLM should hold so many full contexts at once, or so many tokens.
CONTEXTS = 2
# A pass is larger than the longest sample where that costs nothing else.
COMFORTABLE_PASS = 8192
# Of a machine's memory without a GPU: other programs run there, too.
USABLE_OF_MACHINE = 0.75


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The configured values; None: the plan chooses. Devices are places in the list of cards."""

    max_model_len: int | None = None
    utilization: float | None = None
    tokens_per_pass: int | None = None
    max_sample_tokens: int | None = None
    vllm_devices: tuple[int, ...] | None = None
    trainer_devices: tuple[int, ...] | None = None
    checkpointing: bool = True
    served: bool = True  # vLLM runs on this machine, too
    trained: bool = True  # and the trainer
    adapter: Adapter = field(default_factory=Adapter)
    full: bool = False  # all weights are trained
    reference: bool = False  # and compared with those of the base model


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings, and the bytes that they take on each of vLLM's cards and on the trainer's."""

    cards: tuple[float, ...]
    vllm_devices: tuple[int, ...]
    trainer_devices: tuple[int, ...]
    max_model_len: int
    utilization: float
    tokens_per_pass: int
    max_sample_tokens: int
    kv_tokens: int
    vllm: dict[str, float]
    trainer: dict[str, float]

    @property
    def shared(self) -> bool:
        """Return whether vLLM and the trainer use a card together."""
        return bool(self.vllm) and bool(set(self.vllm_devices) & set(self.trainer_devices))


def plan(shape: DecoderShape, cards: Sequence[float], wanted: PlanRequest) -> Plan:
    """Return the plan with the longest context that fits cards of so many GiB; ConfigError if nothing fits."""
    vllm, trainer = _devices(shape, len(cards), wanted)
    longest = wanted.max_model_len or shape.context
    lengths = [longest] if wanted.max_model_len else _lengths(longest)
    for length in lengths:
        found = _with_length(shape, cards, wanted, vllm, trainer, length)
        if found.kv_tokens >= (CONTEXTS * length if wanted.max_model_len is None else length):
            return found
    raise ConfigError(_refusal(shape, cards, found, wanted))


def pass_on_cpu(
    shape: DecoderShape, gib: float, wanted: PlanRequest, kv_cache_gib: float, most: int
) -> tuple[int, bool]:
    """Return how many tokens a pass takes on a machine of so many GiB, and whether it needs gradient checkpointing.

    At least 1; at most `most`, unless the longest sample has more. Without `wanted.checkpointing`, it is needed where
    the longest sample would not fit.
    """
    width = memory.FLOAT32
    weights = width * shape.parameters
    server = weights + memory.SERVING + kv_cache_gib * GIB if wanted.served else 0.0
    if wanted.full:
        own = memory.master_weights(shape, reference=wanted.reference) + memory.full_gradients(shape)
    else:
        own = weights + memory.trained_adapters(shape, wanted.adapter)
    room = USABLE_OF_MACHINE * gib * GIB - server - own - memory.CONTEXT

    def fitting(checkpointing: bool) -> int:
        return bisect_right(
            range(1, most + 1),
            room,
            key=lambda n: memory.HEAP * memory.training_pass(shape, n, checkpointing=checkpointing, width=width),
        )

    sample = min(wanted.max_sample_tokens or shape.context, most)
    needed = not wanted.checkpointing and fitting(False) < sample
    return max(1, fitting(wanted.checkpointing or needed)), needed


def _lengths(longest: int) -> list[int]:
    return [longest, *range((longest - 1) // LENGTH_STEP * LENGTH_STEP, LEAST_LENGTH - 1, -LENGTH_STEP)]


def _devices(shape: DecoderShape, cards: int, wanted: PlanRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trainer gets the last card; vLLM gets as many of the others as its tensor parallelism can use."""
    trainer = (wanted.trainer_devices or (cards - 1,)) if wanted.trained else ()
    if wanted.vllm_devices:
        vllm = wanted.vllm_devices
    else:
        others = [card for card in range(cards) if card not in trainer] or [0]
        parallel = 1
        while 2 * parallel <= len(others) and shape.kv_heads % (2 * parallel) == 0:
            parallel *= 2
        vllm = tuple(others[:parallel])
    if missing := [card for card in (*vllm, *trainer) if card >= cards]:
        raise ConfigError(f"vllm.devices, trainer.devices: there is no GPU {missing[0]}, only 0 to {cards - 1}")
    return vllm, trainer


def _with_length(
    shape: DecoderShape,
    cards: Sequence[float],
    wanted: PlanRequest,
    vllm: tuple[int, ...],
    trainer: tuple[int, ...],
    length: int,
) -> Plan:
    sample = wanted.max_sample_tokens or length
    fixed = _server(shape, wanted, len(vllm))
    card = min(cards[i] for i in vllm) * GIB
    a_token = memory.kv_cache(shape, 1) / len(vllm)
    shared = wanted.served and bool(set(vllm) & set(trainer))

    def room(tokens: int) -> float:
        """The memory that a pass of so many tokens leaves to vLLM's cache."""
        taken = sum(_trainer(shape, wanted, tokens).values()) if shared else 0.0
        own = wanted.utilization or (USABLE if shared else ALONE)
        if shared and wanted.utilization and taken > (USABLE - own) * card:
            return 0.0  # vLLM takes its share, whatever it needs
        return min(own * card, USABLE * card - taken) - sum(fixed.values())

    tokens = wanted.tokens_per_pass or sample
    if wanted.tokens_per_pass is None and tokens < COMFORTABLE_PASS:
        enough = 2 * CONTEXTS * length * a_token
        tokens = next(
            (n for n in (COMFORTABLE_PASS, COMFORTABLE_PASS // 2) if n > tokens and room(n) >= enough), tokens
        )
    of_trainer = _trainer(shape, wanted, max(tokens, sample))
    fits = all(sum(of_trainer.values()) <= USABLE * cards[i] * GIB for i in trainer)
    kv_tokens = max(0, int(room(max(tokens, sample)) / a_token)) if fits else 0
    of_vllm = {**fixed, "KV cache": kv_tokens * a_token} if wanted.served else {}
    utilization = wanted.utilization or max(0.01, int(100 * sum(of_vllm.values()) / card) / 100)
    return Plan(
        tuple(cards), vllm, trainer, length, utilization, tokens, sample, kv_tokens, of_vllm, of_trainer
    )  # fmt: skip


def _server(shape: DecoderShape, wanted: PlanRequest, cards: int) -> dict[str, float]:
    """The memory that vLLM needs on each of its cards besides the cache of keys and values."""
    if not wanted.served:
        return {}
    return {
        "weights": memory.weights(shape) / cards,
        "adapters": memory.served_adapters(shape, wanted.adapter),
        "CUDA, activations": memory.CONTEXT + memory.SERVING,
    }


def _trainer(shape: DecoderShape, wanted: PlanRequest, tokens: int) -> dict[str, float]:
    if not wanted.trained:
        return {}
    if wanted.full:
        needs = {
            "weights": memory.master_weights(shape, reference=wanted.reference),
            "gradients, optimizer": memory.full_gradients(shape),
            "a pass": memory.full_pass(shape, tokens, checkpointing=wanted.checkpointing),
        }
    else:
        needs = {
            "weights": memory.weights(shape),
            "adapters": memory.trained_adapters(shape, wanted.adapter),
            "a pass": memory.training_pass(shape, tokens, checkpointing=wanted.checkpointing),
        }
    needs["CUDA"] = memory.CONTEXT
    return {**needs, "lost in pieces": memory.LOSS * sum(needs.values())}


def _refusal(shape: DecoderShape, cards: Sequence[float], last: Plan, wanted: PlanRequest) -> str:
    """The error for a plan that does not fit, with the shortest context that was tried."""
    needs = []
    if last.trainer:
        trainer, card = sum(last.trainer.values()) / GIB, min(cards[i] for i in last.trainer_devices)
        needs.append(f"the trainer needs {trainer:.0f} GiB of a card of {card:.0f} GiB")
    if last.vllm:
        cache = memory.kv_cache(shape, last.max_model_len) / len(last.vllm_devices) - last.vllm["KV cache"]
        where = "on the same card" if last.shared else "on each of its own"
        share = "" if wanted.utilization is None else f", where vllm.gpu_memory_utilization is {wanted.utilization:g}"
        needs.append(
            f"vLLM {'' if needs else 'needs '}{(sum(last.vllm.values()) + cache) / GIB:.0f} GiB {where}{share}"
        )
    return (
        f"policy.model does not fit: with a context of {last.max_model_len:,} tokens {', and '.join(needs)}; it takes "
        "a smaller model, more or larger cards, or a base model that is sharded (docs/gpu.md)"
    )
