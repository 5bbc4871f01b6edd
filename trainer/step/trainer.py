"""Takes the optimizer steps of LightningRL, scores tokens, and writes and loads checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from peft import get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel, set_seed

from ...core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ..checkpoint import (
    atomic_directory,
    config_changes,
    fingerprint,
    read_state,
    saved_config,
    saved_rate,
    write_config,
)
from ..plan import COMFORTABLE_ON_CPU, TOKENS_PER_PASS
from ..rate import Rate, rate_after, rate_of
from ..report.trackers import Trackers
from ..rows.prefix_tree import MicroBatch, TreeCost, micro_batches
from ..types import Batch, Sample
from ..weights import TrainedWeights, Weights, load_model, lora_config, tolerance, uses_autocast, weight_dtype
from .losses import (
    Answers,
    EntropyBonus,
    context_loss,
    guided,
    kl_penalty,
    loss_inputs,
    masked_tokens,
    policy_loss,
    token_weights,
)
from .processes import Pass, Processes, on_every_process, on_every_shard
from .scoring import ScoredTokens, attention_cost, check_tree_support, fully_scored, longest_sample, score
from .shaping import Shaper
from .shortage import give_back, make_what_fits
from .step_metrics import Numbers, StepMetrics, fault_of_loss, numbers_of, some_rollouts
from .tree_attention import use_tree_attention

log = logging.getLogger(__name__)
STATE_FILE = "state.pt"
State = dict[str, Any]


class StepTotals(NamedTuple):
    """What a pass must know about its adapter's whole step: token weights by rollout, trained tokens, tool tokens."""

    weights: dict[str, float]
    trained: int
    results: int


class LightningTrainer:
    """Holds the policy's weights and takes steps of AdamW on them. `TrainingEngine` documents the methods.

    `model` is the policy with its adapters, `policy_model` the bare causal LM. The ratios of the loss (`losses.py`) are
    to the policies that sampled the answers. `on_every_process` and `on_every_shard` repeat a method in the other
    processes of a launcher (`processes.py`); with one process they only let one thread at a time use the model.
    """

    def __init__(self, config: TrainerConfig, policy: PolicyConfig, processes: Processes | None = None) -> None:
        if policy.model is None:
            raise ConfigError("policy.model: the trainer needs a Hugging Face model id or directory")
        if config.threads:
            torch.set_num_threads(config.threads)
        self.trackers = Trackers(config, policy.directory / "trainer")
        self.tokenizer = AutoTokenizer.from_pretrained(policy.model)
        model = load_model(policy.model, weight_dtype(config))
        longest = longest_sample(model.config, config.max_sample_tokens)
        check_tree_support(model.config, longest)
        self.settings = config = config.model_copy(update={"max_sample_tokens": longest})
        self._rate_of = partial(rate_of, config, int(model.config.get_text_config().hidden_size))
        self.processes = processes or Processes()
        use_tree_attention(model)
        set_seed(config.seed)
        adapted = get_peft_model(model, lora_config(config, model)) if config.weights == "lora" else model
        self.weight_sets = TrainedWeights(adapted, config, policy, self.processes)
        prepare_layers(self.policy_model, config)
        self._saved_config = saved_config(config, policy, fingerprint(adapted))
        state = PartialState(cpu=not torch.cuda.is_available())
        self.device = state.device
        self.model = self.weight_sets.prepare(partial(self.processes.prepare, state))
        self.optimizer = adamw(self.weight_sets.parameters())
        self._updates = 0
        self.rate: Rate = self._rate_of()
        self._served: dict[str, Weights] = {}
        self._computed: tuple[Batch, StepMetrics] | None = None
        self.skipped_because: str | None = None
        self.left_out_because: str | None = None
        self.warnings: dict[str, str] = {}
        self._tolerance = tolerance(config, policy)
        self._read: State | None = None  # the checkpoint that this process alone has read
        self.entropy = EntropyBonus(config.entropy)
        self._shaper = Shaper(self.tokenizer, self.policy_model)
        self._cost = TreeCost(
            attention_cost(self.policy_model.config, self.policy_model.num_parameters(exclude_embeddings=True)),
            min(self.processes.gathered(config.max_tokens_per_batch or TOKENS_PER_PASS)),  # they share out passes
            None if torch.cuda.is_available() else COMFORTABLE_ON_CPU,
        )

    @property
    def policy_model(self) -> PreTrainedModel:
        return self.weight_sets.model

    @property
    def max_tokens(self) -> int:
        assert self.settings.max_sample_tokens is not None
        return self.settings.max_sample_tokens

    @property
    def vocabulary(self) -> int:
        return int(self.policy_model.get_input_embeddings().num_embeddings)

    # Training ------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> dict[str, float]:
        self.forward_backward(batch)
        return self.optim_step()

    @on_every_process
    def forward_backward(self, batch: Batch) -> None:
        """Compute the gradients of `batch`.

        Each adapter gets the gradients of its own samples only. A pass that runs out of memory is halved, unless the
        model is sharded.
        """
        metrics = StepMetrics(self.settings, self.entropy.weight)
        samples = [sample for sample in batch.samples if sample.trained_tokens]
        self.optimizer.zero_grad()
        metrics.numbers = numbers = self._add_gradients(batch, samples)
        if not metrics.skipped:
            self.processes.sum_gradients(self.weight_sets.parameters())
            sets = map(self.weight_sets.parameters, self.weight_sets.names)  # each adapter's by itself
            norms = [self.processes.clip(one, self.settings.max_grad_norm) for one in sets]
            metrics.grad_norm = math.hypot(*norms)  # on a GPU this waits for the backward passes
            if not math.isfinite(metrics.grad_norm):
                numbers.fault = f"the gradient is not finite for {some_rollouts([s.rollout_id for s in samples])}"
        self.warnings = metrics.warnings(self._tolerance)
        reasons = [numbers.fault, self.warnings.get("sampler")]
        if not metrics.grad_norm:
            reasons += [self.warnings.get("masked_tokens"), self.warnings.get("outside_tokens")]
        numbers.fault = next(filter(None, reasons), None)
        metrics.forward_backward_s = metrics.elapsed
        self._computed = batch, metrics

    @on_every_process
    def optim_step(self) -> dict[str, float]:
        """Update the weights with the last batch's gradients.

        If the step is skipped, for example because a loss is not finite, weights, optimizer and schedule do not change,
        `skipped` is 1 and `skipped_because` says why. Metrics that are not finite are left out.
        `left_out_because` names rollouts with a row that does not fit into memory; `warnings` has other problems.
        """
        assert self._computed is not None, "forward_backward comes first"
        (batch, metrics), self._computed = self._computed, None
        metrics.started += metrics.elapsed - metrics.forward_backward_s  # what came between is not the step's
        metrics.learning_rate = rate_after(self.settings, self.rate.value, self._updates)
        self.left_out_because = metrics.too_large()
        self.skipped_because = metrics.numbers.fault or self.left_out_because
        if not metrics.skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = metrics.learning_rate
            self.optimizer.step()
            self._updates += 1
            self.entropy.update(metrics.numbers.mean("entropy"))
        self.optimizer.zero_grad()
        metrics.optimizer_s = metrics.elapsed - metrics.forward_backward_s
        self.trackers.step = batch.step
        give_back()
        return {name: value for name, value in {**batch.metrics, **metrics.result()}.items() if math.isfinite(value)}

    def _add_gradients(self, batch: Batch, samples: Sequence[Sample]) -> Numbers:
        """Run the forward and backward passes over `samples`. Return the numbers of all processes together."""
        self.model.train()
        totals = {adapter: self._totals(batch, samples, adapter) for adapter in self.weight_sets.names}
        passes = self.processes.passes(micro_batches(samples, self._cost), self._cost)

        def make(one: Pass) -> Numbers:
            return self._pass(one, totals[one.micro_batch.adapter], batch.version)

        numbers = Numbers(fault=None if samples else "it has no trainable tokens")
        if self.processes.sharded:  # a process that halved its pass, or left one out, would leave the others waiting
            own = Numbers()
            for one in passes:
                own.add(make(one))
        else:
            own = make_what_fits(passes, make, self.weight_sets.parameters())
        for part in self.processes.gathered(own):
            numbers.add(part)
        if numbers.fitting < self._cost.max_nodes:
            log.warning("passes have at most %d tokens from now on; see trainer.max_tokens_per_batch", numbers.fitting)
            self._cost = replace(self._cost, max_nodes=numbers.fitting)
        return numbers

    def _totals(self, batch: Batch, samples: Sequence[Sample], adapter: str) -> StepTotals:
        own = [sample for sample in samples if sample.adapter == adapter]
        compared = batch.compared_by_adapter.get(adapter, batch.compared)
        weights = token_weights(own, self.settings, compared)
        results = sum(end - start for sample in own for start, end in sample.results)
        return StepTotals(weights, sum(sample.trained_tokens for sample in own), results)

    def _pass(self, one: Pass, totals: StepTotals, version: int | None) -> Numbers:
        """Run a pass, add its gradients, and return its numbers. A pass that does not count adds zeros."""
        samples, config = one.micro_batch.samples, self.settings
        answers, reference = Answers.of(samples, self.device), None
        if config.kl_coef or config.kl_metric:
            # Before the policy's own pass: gradient checkpointing computes layers again, and the adapter must be on.
            reference = answers.take(self._reference(one.micro_batch))
        scores = self._score(one.micro_batch, results=config.context_loss is not None)
        given = loss_inputs(samples, answers, answers.take(scores.logprobs), totals.weights, config)
        given, guides = guided(given, samples, answers)
        entropies = answers.take(scores.entropies)
        loss = policy_loss(given)
        masked = masked_tokens(loss, given) if config.loss else torch.zeros(())
        if reference is not None:
            reference = torch.where(reference.isneginf(), given.logprobs.detach(), reference)
            if config.kl_coef:
                loss = loss + config.kl_coef * kl_penalty(given, reference)
        if self.entropy.weight:
            loss = loss - self.entropy.weight * (entropies * given.mask).sum() / totals.trained
        if config.context_loss is not None:
            loss = loss + context_loss(scores.logprobs, samples, totals.results, config)
        if not one.counts:
            (loss * 0.0).backward()
            return Numbers()
        sums = {"loss": loss.detach(), "masked_tokens": masked.sum(), "entropy": (entropies * given.mask).sum()}
        numbers = numbers_of(one.micro_batch, answers.rows, given, guides, reference, version, sums)
        if not loss.isfinite():
            numbers.fault = fault_of_loss([samples[row].rollout_id for row in answers.rows[:, 0]], given)
        if numbers.fault is None or self.processes.sharded:
            loss.backward()
        return numbers

    # Scoring -------------------------------------------------------------------------------------------------------

    def logprobs(
        self, token_ids: Sequence[Sequence[int]], adapter: str = DEFAULT_ADAPTER, *, served: bool = False
    ) -> list[list[float]]:
        return self.scores_of([fully_scored(tuple(ids), adapter) for ids in token_ids], served=served)

    @on_every_shard
    @torch.no_grad()
    def scores_of(self, samples: Sequence[Sample], *, served: bool = False) -> list[list[float]]:
        self.model.eval()
        found = {id(sample): [0.0] * len(sample.token_ids) for sample in samples}
        with ExitStack() as stack:
            for adapter in {sample.adapter for sample in samples} if served else ():
                stack.enter_context(self.weight_sets.exchanged(adapter, self._served[adapter]))
            for one in micro_batches([sample for sample in samples if sample.trained_tokens], self._cost):
                for sample, values in zip(one.samples, self._score(one).logprobs.tolist(), strict=True):
                    found[id(sample)] = values[: len(sample.token_ids)]
        return [found[id(sample)] for sample in samples]

    @on_every_shard
    def remember_served(self, adapter: str = DEFAULT_ADAPTER) -> None:
        self._served[adapter] = self.weight_sets.copy(adapter)

    def _score(
        self, micro_batch: MicroBatch, model: PreTrainedModel | None = None, *, results: bool = False
    ) -> ScoredTokens:
        self.weight_sets.activate(micro_batch.adapter)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=uses_autocast(self.settings)):
            bonus, tree, samples = self.entropy.weight > 0, micro_batch.tree, micro_batch.samples
            model = model or self.policy_model
            return score(model, tree, samples, self._shaper, entropy_gradient=bonus, results=results)

    @torch.no_grad()
    def _reference(self, micro_batch: MicroBatch) -> Tensor:
        """Return (B, T) log-probabilities under the base model, for the same pass."""
        self.model.eval()
        with self.weight_sets.reference() as base:
            logprobs = self._score(micro_batch, base).logprobs
        self.model.train()
        return logprobs

    # Weights and checkpoints ---------------------------------------------------------------------------------------

    @on_every_shard
    def adapter(self, name: str = DEFAULT_ADAPTER) -> Weights:
        return self.weight_sets.weights(name)

    def adopt(self, step: int) -> None:
        """Record that the weights were trained in step `step` by other means. Drop the optimizer's moments."""
        self.optimizer.state.clear()
        self.trackers.step = step

    @on_every_shard
    def save(self, directory: Path) -> None:
        state = {
            "step": self.trackers.step,
            "adapters": self.weight_sets.all_weights(),
            "optimizer": self.weight_sets.optimizer_state(self.optimizer),
            "scheduler": {"last_epoch": self._updates},
            "entropy": self.entropy.state(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
        }
        if self.processes.rank == 0:
            with atomic_directory(directory) as temporary:
                torch.save(state, temporary / STATE_FILE)
                write_config(temporary, self._saved_config, self.rate.value)

    def load(self, directory: Path) -> int:
        """Resume from what `save` wrote.

        A configured learning rate wins; `auto` keeps that of a trained checkpoint. Raises ConfigError, and changes
        nothing, if the checkpoint is damaged or does not fit the configuration.
        """
        changed = config_changes(directory, self._saved_config)
        state = read_state(directory / STATE_FILE, self.weight_sets.shapes())
        if "optimizer" not in state:
            log.warning("%s has no optimizer state: the moments and the schedule start over", directory)
        rate = self.rate
        if state["step"]:  # untrained weights have no rate to keep
            rate = self._rate_of(saved_rate(directory))
        self._read = state
        sent = state
        if self.weight_sets.sharded:  # others get their parts of weights and moments from process 0
            sent = state | {key: _on_meta(state[key]) for key in ("adapters", "optimizer") if key in state}
        self._restore(sent, rate)
        self._read = None
        if changed:
            log.warning("the configuration changed since %s was written: %s", directory, ", ".join(changed))
        return int(state["step"])

    @on_every_process
    def _restore(self, state: State, rate: Rate) -> None:
        """Load the state and the rate. Without the optimizer's state, its moments and the schedule start over."""
        state = self._read or state
        self.weight_sets.set(state["adapters"])
        self.weight_sets.load_optimizer_state(self.optimizer, state.get("optimizer", {}))
        self._updates = state["scheduler"]["last_epoch"] if "optimizer" in state else 0
        self.entropy.load(state.get("entropy", {}))
        torch.set_rng_state(state["rng"])
        for device, rng in zip(range(torch.cuda.device_count()), state.get("cuda_rng", ()), strict=False):
            torch.cuda.set_rng_state(rng, device)  # devices that were not there then keep theirs
        self.trackers.step = state["step"]
        self.rate = rate

    @on_every_shard
    def save_weights(self, directory: Path, *, merged: bool) -> None:
        self.weight_sets.save(directory, self.tokenizer, merged=merged)

    def end(self) -> None:
        self.processes.end()

    def close(self) -> None:
        self.trackers.close()


def prepare_layers(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Switch dropout off. If configured, let layers recompute their activations in the backward pass.

    They do so only in training mode: scoring without gradients keeps no activations anyway.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    wanted = config.gradient_checkpointing
    if wanted is True or (wanted == "auto" and torch.cuda.is_available()):
        # Without dropout a layer draws no random numbers, so there is no state to keep.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW without weight decay. Separate kernel calls update sharded and unsharded parameters."""
    groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], weight_decay=0.0, fused=True)


def _on_meta(value: Any) -> Any:
    """Return nested tensors as meta tensors; 0-dimensional ones keep their values."""
    if isinstance(value, dict):
        return {key: _on_meta(inner) for key, inner in value.items()}
    return value.to("meta") if value.dim() else value
