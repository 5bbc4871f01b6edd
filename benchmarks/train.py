"""One optimiser step on the same rollouts, three ways: `make bench-train`, `python benchmarks/train.py --help`.

8 siblings × 6 turns, 100 tokens answered and 100 observed a turn, over a prompt of 1,000 tokens; a model with random
weights, whose layers have a real model's shape. Each way is forward, loss, backward and optimiser step, in passes of at
most as many tokens as the trainer's own budget; the ways take turns, and their gradients are compared.

- TRL, a row per call: GRPOTrainer's own log-probabilities and loss on padded rows, one for each of the 48 calls.
- TRL, a row per rollout: the same on the 8 rows that the calls merge into.
- lightning-proxy: the trainer's own step, which computes what rows share once.
- floor: the unique tokens without attention to each other, the linear layers and the head alone: so far each has to be
  computed, whatever is shared.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Page, machine, option
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from lightning_proxy.core.config.policy import PolicyConfig
from lightning_proxy.core.config.trainer import TrainerConfig
from lightning_proxy.core.records import Choice, ModelCall
from lightning_proxy.trainer.rows.prefix_tree import PrefixTree, build_tree
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.step.losses import token_weights
from lightning_proxy.trainer.step.scoring import score
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from lightning_proxy.trainer.weights import uses_autocast

PRESETS = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """How much there is to do."""

    siblings: int
    turns: int
    prompt: int
    answered: int
    observed: int


class PaddedTrainer(LightningTrainer):
    """The same weights and optimiser, with TRL's own forward pass and loss over padded rows in `padded_step`."""

    def padded_step(self, samples: Sequence[Sample]) -> None:
        weights = token_weights(samples, self.settings)
        trl = self.trl
        trl.current_gradient_accumulation_steps = trl.args.steps_per_generation
        self.model.train()
        for rows in in_passes(samples, self.settings.max_tokens_per_batch):
            inputs = padded_inputs(rows, weights, self.device)
            with self.autocast():
                trl._compute_loss(self.model, inputs).backward()
        self.finish()

    @cached_property
    def trl(self) -> Any:
        """TRL's trainer of the same model."""
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        config = self.settings
        args = GRPOConfig(
            use_cpu=self.device.type == "cpu", bf16=False, report_to="none", loss_type="cispo",
            epsilon=config.clip_low, epsilon_high=config.importance_cap, num_generations=2,
            per_device_train_batch_size=2, gradient_checkpointing=False,
        )  # fmt: skip
        rows = Dataset.from_dict({"prompt": [""]})
        return GRPOTrainer(self.model, lambda **_: [], args, rows, processing_class=self.tokenizer)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=uses_autocast(self.settings))

    def finish(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def in_passes(samples: Sequence[Sample], budget: int) -> Iterator[Sequence[Sample]]:
    """As many rows as fit, padding included."""
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    while ordered:
        n = max(1, budget // padded_length(ordered[-1:]))
        while n > 1 and n * padded_length(ordered[-n:]) > budget:
            n -= 1
        yield ordered[-n:]
        del ordered[-n:]


def padded_length(samples: Sequence[Sample]) -> int:
    prompts = [sample.mask.index(1) for sample in samples]
    return max(prompts) + max(len(s.mask) - n for s, n in zip(samples, prompts, strict=True))


def padded_inputs(samples: Sequence[Sample], weights: dict[str, float], device: torch.device) -> dict[str, Tensor]:
    """As TRL's generation leaves them: prompts padded on the left, completions on the right."""
    starts = [sample.mask.index(1) for sample in samples]

    def pad(rows: list[list[float]], dtype: torch.dtype, side: str) -> Tensor:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side).to(device)

    def completions(rows: Iterator[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return pad([list(row[n:]) for row, n in zip(rows, starts, strict=True)], dtype, "right")

    prompts = [list(s.token_ids[:n]) for s, n in zip(samples, starts, strict=True)]
    return {
        "prompt_ids": pad(prompts, torch.int64, "left"),
        "prompt_mask": pad([[1] * len(row) for row in prompts], torch.int64, "left"),
        "completion_ids": completions((s.token_ids for s in samples), torch.int64),
        "completion_mask": completions(([1] * len(s.mask) for s in samples), torch.int64),
        "tool_mask": completions((s.mask for s in samples), torch.int64),
        "advantages": completions(([a * weights[s.rollout_id] for a in s.advantages] for s in samples), torch.float32),
        "old_per_token_logps": completions((s.logprobs for s in samples), torch.float32),
        "num_items_in_batch": torch.tensor(1.0, device=device),
    }


def recorded_calls(work: Work, vocabulary: int, seed: int) -> dict[str, list[ModelCall]]:
    """Rollouts of one task whose turns continue each other's tokens."""
    rng = random.Random(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(n))

    prompt, rollouts = tokens(work.prompt), {}
    for sibling in range(work.siblings):
        name, shown, calls = f"rollout-{sibling}", prompt, []
        for turn in range(work.turns):
            answer = tokens(work.answered)
            logprobs = tuple(-math.log(vocabulary) + rng.gauss(0, 0.1) for _ in answer)
            calls.append(ModelCall(
                call_id=f"{name}-{turn}", rollout_id=name, seq=turn, agent=None, endpoint="chat/completions",
                status="ok", model="policy", policy_version=0, policy_versions=(0,), request={}, response={},
                prompt_token_ids=shown, choices=(Choice(0, answer, logprobs),), usage=None, tool_calls=(), reward=None,
                trainable=True, untrainable_reason=None, error=None, http_status=200, started_at=0.0, ttft_ms=None,
                latency_ms=None, upstream=None, extends=None, superseded_by=None,
            ))  # fmt: skip
            shown = (*shown, *answer, *tokens(work.observed))
        rollouts[name] = calls
    return rollouts


def rows_of(rollouts: dict[str, list[ModelCall]], *, merged: bool) -> list[Sample]:
    samples: list[Sample] = []
    for i, calls in enumerate(rollouts.values()):
        advantage = 1.0 if i % 2 else -1.0
        for group in [calls] if merged else [[call] for call in calls]:
            made = rollout_samples(group, [advantage] * len(group), task_id="task", max_tokens=10**9)
            samples += made.samples
    return samples


def lone_nodes(tree: PrefixTree) -> PrefixTree:
    """The same nodes, each the root of a tree of its own: nobody sees anybody else."""
    n = torch.arange(len(tree)).numpy()
    return PrefixTree(tree.token_ids, n * 0, n + 1, tree.paths)


@dataclass
class Way:
    """One way to take the step, with what was measured of it."""

    name: str
    step: Callable[[], object]
    tokens: int
    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0
    gradient: Tensor | None = None


class Bench:
    """The trainer on a model with random weights, and the ways to take its step."""

    def __init__(self, config: LlamaConfig | Qwen2Config, work: Work, directory: Path, budget: int, dtype: str) -> None:
        save_random_model(config, directory / "model")
        settings = TrainerConfig.model_validate({
            "report_to": [], "dtype": dtype, "max_tokens_per_batch": budget, "max_grad_norm": 1e9,
            "max_sample_tokens": 1_000_000, "learning_rate": 1e-5,
        })  # fmt: skip
        self.trainer = PaddedTrainer(settings, PolicyConfig(model=str(directory / "model"), directory=directory))
        torch.manual_seed(1)
        for parameter in self.trainer.model.parameters():  # B of LoRA begins as zero: A would have no gradient
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.02)
        rollouts = recorded_calls(work, config.vocab_size, seed=0)
        self.calls, self.merged = rows_of(rollouts, merged=False), rows_of(rollouts, merged=True)
        self.tree = build_tree([s.token_ids[:-1] for s in self.merged])
        self._saved = [p.detach().clone() for p in self._parameters()]
        self.trainer.optimizer.register_step_pre_hook(lambda *_: self._keep_gradient())
        self._gradient: Tensor | None = None
        assert self.trainer.trl is not None  # made here, and not in the first step

    def ways(self) -> list[Way]:
        budget = self.trainer.settings.max_tokens_per_batch
        batch = Batch(1, tuple(self.merged), tuple({s.rollout_id for s in self.merged}))
        padded = []
        for rows in (self.calls, self.merged):
            passes = [(len(p), padded_length(p)) for p in in_passes(rows, budget)]
            padded.append(sum(n * length for n, length in passes))
        return [
            Way("TRL, a row per call", lambda: self.trainer.padded_step(self.calls), padded[0]),
            Way("TRL, a row per rollout", lambda: self.trainer.padded_step(self.merged), padded[1]),
            Way("lightning-proxy", lambda: self.trainer.step(batch), 0),
            Way("floor", self.floor, len(self.tree)),
        ]

    def floor(self) -> None:
        """Every unique token by itself, and the scores of the trained ones."""
        self.trainer.model.train()
        with self.trainer.autocast():
            scores = score(self.trainer.policy_model, lone_nodes(self.tree), self.merged)
        scores.logprobs.sum().backward()
        self.trainer.finish()

    def measure(self, way: Way) -> None:
        """One step from the same weights."""
        with torch.no_grad():
            for parameter, saved in zip(self._parameters(), self._saved, strict=True):
                parameter.copy_(saved)
        synchronize()
        forget_peak()
        started = time.perf_counter()
        result = way.step()
        synchronize()
        way.seconds.append(time.perf_counter() - started)
        if isinstance(result, dict):
            way.tokens = int(result["computed_tokens"])
        way.peak = peak_bytes()
        way.gradient = self._gradient
        print(f"{way.name}: {way.seconds[-1]:.2f} s", file=sys.stderr, flush=True)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.trainer.model.parameters() if p.requires_grad]

    def _keep_gradient(self) -> None:
        self._gradient = torch.cat([p.grad.flatten().float() for p in self._parameters() if p.grad is not None])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> float:
    """Of the GPU's memory, or of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(status.partition("VmHWM:")[2].split()[0])


def save_random_model(config: LlamaConfig | Qwen2Config, directory: Path) -> None:
    torch.manual_seed(0)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 1
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w1").save_pretrained(directory)


def relative_difference(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return float((found - expected).norm() / expected.norm())


def table(ways: list[Way]) -> Iterator[str]:
    ours = next(way for way in ways if way.name == "lightning-proxy")
    yield "| way | tokens | s a step | relative to ours | peak memory | gradient differs |"
    yield "|---|---|---|---|---|---|"
    for way in ways:
        differs = ""
        if way.name not in ("floor", ours.name):
            differs = f"{relative_difference(ours.gradient, way.gradient):.1e}"
        yield (
            f"| {way.name} | {way.tokens:,} | {median(way.seconds):.2f} ({min(way.seconds):.2f}–{max(way.seconds):.2f})"
            f" | **{median(way.seconds) / median(ours.seconds):.2f} ×** | {way.peak / 2**30:.1f} GiB"
            f" | {differs} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, help="default: smollm2-135m on a CPU, qwen2.5-0.5b on a GPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="of the model's; default: 8 on a CPU, all on a GPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8192, help="trainer.max_tokens_per_batch")
    parser.add_argument("--work", default="8,6,1000,100,100", help="siblings,turns,prompt,answered,observed")
    parser.add_argument("--vocabulary", type=int, help="default: the model's")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    option(parser)
    options = parser.parse_args()
    if (options.device == "cuda") != torch.cuda.is_available():
        parser.error("the trainer takes a GPU where there is one, and a CPU where there is none")
    cuda = options.device == "cuda"
    name = options.model or ("qwen2.5-0.5b" if cuda else "smollm2-135m")
    config, work = PRESETS[name], Work(*map(int, options.work.split(",")))
    layers = options.layers or (config.num_hidden_layers if cuda else 8)
    whole, config.num_hidden_layers = config.num_hidden_layers, layers
    config.layer_types = ["full_attention"] * layers
    config.vocab_size = options.vocabulary or config.vocab_size
    dtype = "bfloat16" if cuda else "float32"
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(config, work, Path(directory), options.budget, dtype)
        ways = bench.ways()
        if cuda:  # kernels are compiled
            for way in ways:
                bench.measure(way)
                way.seconds.clear()
        for _ in range(options.rounds):
            for way in ways:
                bench.measure(way)
    where = torch.cuda.get_device_name() if cuda else machine()
    page = Page("A training step")
    about = (
        f"On {where}: {name}'s shape, {layers} of {whole} layers, {dtype}, "
        f"{work.siblings} siblings × {work.turns} turns over {work.prompt:,} tokens, {options.budget:,} a pass; "
        f"{options.rounds} rounds, median (least–most)."
    )
    page.text([about, "", *table(ways)])
    page.save(options.page)
    differing = [relative_difference(ways[2].gradient, way.gradient) for way in ways[:2]]
    if options.json:
        figures = {w.name: {"seconds": w.seconds, "tokens": w.tokens, "peak": w.peak} for w in ways}
        options.json.write_text(json.dumps({"ways": figures, "differing": differing}))
    allowed = 0.1 if cuda else 1e-4
    if max(differing) > allowed:
        print(f"FAILED: gradients differ by {max(differing):.1e}")
    return int(max(differing) > allowed)


if __name__ == "__main__":
    raise SystemExit(main())
