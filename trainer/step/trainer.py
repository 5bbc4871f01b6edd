"""One optimizer step of LightningRL, on TRL's GRPOTrainer. Rows come from the store."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, ProgressCallback

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
from ..rate import rate_of
from ..report.trackers import Trackers
from ..rows.prefix_tree import MicroBatch, TreeCost, micro_batches
from ..types import Batch, Sample
from ..weights import TrainedWeights, Weights, load_model, lora_config, tolerance, weight_dtype
from .losses import (
    Answers,
    EntropyBonus,
    StepTokens,
    add_guidance,
    context_loss,
    entropy_term,
    kl_penalty,
    leave_out_tokens,
    loss_inputs,
    masked_tokens,
    own_loss,
    policy_loss,
    token_weights,
    tokens_by_adapter,
)
from .processes import Pass, Processes, on_every_process, on_every_shard
from .scoring import ScoredTokens, attention_cost, check_tree_support, fully_scored, logprobs_of, longest_sample, score
from .shaping import Shaper
from .shortage import give_back, make_what_fits, too_large
from .step_metrics import StepMetrics, fault_of_loss, some_rollouts
from .tree_attention import use_tree_attention
from .trl_config import ENDLESS, checkpoint_layers, grpo_config, rewards_come_from_the_store

sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]
try:  # TRL would import vLLM for its own client, which is not used: seconds, and 160 MB
    from trl import GRPOTrainer
finally:
    if sys.modules["vllm"] is None:
        del sys.modules["vllm"]

log = logging.getLogger(__name__)
STATE_FILE = "state.pt"
State = dict[str, Any]
SHARDED = ("adapters", "optimizer")


class LightningTrainer(GRPOTrainer):
    """A GRPOTrainer driven from outside: by `step`, `save`, `load` and `logprobs` instead of `train()`.

    The loss has TRL's terms (`losses.py`). Its ratios are to the policies that sampled the answers.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any

    def __init__(self, config: TrainerConfig, policy: PolicyConfig, processes: Processes | None = None) -> None:
        """`processes`: a single one by default."""
        if policy.model is None:
            raise ConfigError("policy.model: the trainer needs a Hugging Face model id or directory")
        if config.threads:
            torch.set_num_threads(config.threads)
        self.trackers = Trackers(config.report_to, policy.directory / "trainer")
        model = load_model(policy.model, weight_dtype(config))
        self._rate_of = partial(rate_of, config, int(model.config.get_text_config().hidden_size))
        self.rate = self._rate_of()
        use_tree_attention(model)
        super().__init__(
            model=model,
            args=grpo_config(config, self.rate.value, policy.directory / "trainer", self.trackers.run_name),
            # TRL wants both and would use them in `train()`, which is never called.
            reward_funcs=rewards_come_from_the_store,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=AutoTokenizer.from_pretrained(policy.model),
            peft_config=lora_config(config, model) if config.weights == "lora" else None,
        )
        longest = {"max_sample_tokens": longest_sample(model.config, config.max_sample_tokens)}
        self.settings = config.model_copy(update=longest)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.trackers.attach(self)
        self._prepare(policy, processes or Processes())

    def _prepare(self, policy: PolicyConfig, processes: Processes) -> None:
        config = self.settings
        self.processes = processes
        self.weight_sets = TrainedWeights(self.model, config, policy, processes)
        self._served: dict[str, Weights] = {}
        checkpoint_layers(self.policy_model, config)
        self._saved_config = saved_config(config, policy, fingerprint(self.model))
        self.model = self.weight_sets.prepare(partial(processes.prepare, self.accelerator))
        self.create_optimizer_and_scheduler(num_training_steps=config.max_steps or ENDLESS)
        self.optimizer = self.accelerator.prepare_optimizer(self.optimizer)
        self._computed: tuple[Batch, StepMetrics] | None = None
        self.skipped_because: str | None = None
        self.left_out_because: str | None = None
        self.warnings: dict[str, str] = {}
        self._tolerance = tolerance(config, policy)
        self._read: State | None = None  # the checkpoint that this process alone has read
        self.entropy = EntropyBonus(config.entropy)
        self._shaper = Shaper(self.processing_class, self.policy_model)
        check_tree_support(self.policy_model.config, self.max_tokens)
        self._cost = TreeCost(
            attention_cost(self.policy_model.config, self.policy_model.num_parameters(exclude_embeddings=True)),
            min(processes.gathered(config.max_tokens_per_batch or TOKENS_PER_PASS)),  # they share out the same passes
            None if torch.cuda.is_available() else COMFORTABLE_ON_CPU,
        )

    @property
    def policy_model(self) -> PreTrainedModel:
        """Return the bare causal LM; it may have LoRA layers in it."""
        return self.weight_sets.model

    @property
    def max_tokens(self) -> int:
        """Return the longest sample that the model and the configuration allow."""
        assert self.settings.max_sample_tokens is not None
        return self.settings.max_sample_tokens

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the model has embeddings of."""
        return int(self.policy_model.get_input_embeddings().num_embeddings)

    # Training ------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on `batch`. Return its metrics together with the batch's own."""
        self.forward_backward(batch)
        return self.optim_step()

    @on_every_process
    def forward_backward(self, batch: Batch) -> None:
        """Compute the gradients of `batch`, in place of earlier ones.

        Each adapter gets those that its own samples alone would give it; without any, it has none.
        A pass that memory runs out in is made in halves.
        """
        metrics = StepMetrics(time.perf_counter(), self.settings, batch.version, entropy_coef=self.entropy.weight)
        samples = [sample for sample in batch.samples if sample.trained_tokens]
        self.optimizer.zero_grad()
        metrics = self._add_gradients(batch, samples, metrics)
        if metrics.micro_batches and metrics.fault is None:
            self.processes.sum_gradients(self.weight_sets.parameters())
            metrics.grad_norm = self._clip_gradients()  # on a GPU this waits for the backward passes
            if not math.isfinite(metrics.grad_norm):
                metrics.fault = f"the gradient is not finite over {some_rollouts([s.rollout_id for s in samples])}"
        self.warnings = metrics.warnings(self._tolerance)
        metrics.fault = metrics.fault or self.warnings.get("sampler")
        if not metrics.grad_norm:
            metrics.fault = metrics.fault or self.warnings.get("masked_tokens") or self.warnings.get("outside_tokens")
        metrics.forward_backward_s = metrics.elapsed
        self._computed = batch, metrics

    @on_every_process
    def optim_step(self) -> dict[str, float]:
        """Move the weights by the last batch's gradients. Return the step's metrics together with the batch's own.

        If a loss or gradient is not finite, weights, optimizer and scheduler stay as they are and `skipped` is 1.
        `skipped_because` then says what is not finite, in which rollouts; metrics that are not finite are left out.
        `left_out_because` names rollouts with a row too large alone; `warnings` say what else is wrong with the tokens.
        """
        assert self._computed is not None, "forward_backward comes first"
        (batch, metrics), self._computed = self._computed, None
        metrics.started += metrics.elapsed - metrics.forward_backward_s  # what came between is not the step's
        metrics.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        metrics.skipped = not metrics.micro_batches or metrics.fault is not None
        self.left_out_because = too_large(metrics)
        self.skipped_because = metrics.fault or self.left_out_because
        if not metrics.skipped:
            self.optimizer.step()
            self.lr_scheduler.step()
            self.entropy.update(metrics.entropy)
        self.optimizer.zero_grad()
        metrics.optimizer_s = metrics.elapsed - metrics.forward_backward_s
        self.state.global_step = batch.step
        give_back()
        return {name: value for name, value in {**batch.metrics, **metrics.result()}.items() if math.isfinite(value)}

    def _add_gradients(self, batch: Batch, samples: Sequence[Sample], metrics: StepMetrics) -> StepMetrics:
        """Forward and backward passes over `samples`; returns the metrics of all processes together."""
        self.model.train()
        metrics.fault = None if samples else "it has no trainable tokens"
        weights = {adapter: self._token_weights(batch, adapter) for adapter in self.weight_sets.names}
        tokens = tokens_by_adapter(samples)
        passes = self.processes.passes(micro_batches(samples, self._cost), self._cost)

        def make(one: Pass, metrics: StepMetrics) -> None:
            adapter = one.micro_batch.adapter
            self._pass(one, weights[adapter], tokens[adapter], metrics)

        if self.processes.sharded:  # a process that halved its pass, or left one out, would leave the others waiting
            for one in passes:
                make(one, metrics)
        else:
            metrics = make_what_fits(passes, make, self.weight_sets, metrics)
        metrics = metrics.sum(self.processes.gathered(metrics.sendable()))
        self._allow_tokens(metrics.fitting)
        return metrics

    def _pass(self, one: Pass, weights: dict[str, float], tokens: StepTokens, metrics: StepMetrics) -> None:
        """Add the gradients of one pass, unless its loss is not finite."""
        loss, fault = self._loss(one, weights, tokens, metrics)
        metrics.fault = metrics.fault or fault
        if metrics.fault is None or self.processes.sharded:
            self.accelerator.backward(loss)

    def _allow_tokens(self, fitting: int) -> None:
        """Make later passes no larger than those that fit."""
        if fitting < self._cost.max_nodes:
            log.warning("passes have at most %d tokens from now on; see trainer.max_tokens_per_batch", fitting)
            self._cost = replace(self._cost, max_nodes=fitting)

    def _token_weights(self, batch: Batch, adapter: str) -> dict[str, float]:
        """The weight of a token in each rollout, as if the adapter's samples were all there are."""
        own = [sample for sample in batch.samples if sample.adapter == adapter]
        return token_weights(own, self.settings, batch.compared_by_adapter.get(adapter, batch.compared))

    def _loss(
        self, one: Pass, weights: dict[str, float], tokens: StepTokens, metrics: StepMetrics
    ) -> tuple[Tensor, str | None]:
        """What a pass adds to the step's loss, and why it is not finite; a pass that does not count adds 0.

        `tokens`: of the step and this adapter. `metrics` get the pass's numbers.
        """
        micro_batch = one.micro_batch
        samples, config = micro_batch.samples, self.settings
        answers = Answers.of(samples, self.accelerator.device)
        inputs = loss_inputs(samples, answers, weights, by_answer=config.weighting == "sequence")
        # Before the policy's own pass: gradient checkpointing computes layers again, and the adapter must be on then.
        reference = answers.take(self._reference(micro_batch)) if config.kl_coef or config.kl_metric else None
        scored = self._score(micro_batch, results=config.context_loss is not None)
        scores = ScoredTokens(*map(answers.take, scored))
        logprobs = leave_out_tokens(inputs, scores.logprobs)
        add_guidance(inputs, samples, answers, logprobs, config.guide_limit)
        if reference is not None:
            reference = torch.where(reference.isneginf(), logprobs.detach(), reference)
        loss = (own_loss if config.loss else policy_loss)(logprobs, inputs, config)
        if config.loss:
            inputs["masked"] = masked_tokens(loss, logprobs, inputs, config)
        if config.kl_coef and reference is not None:
            penalty = kl_penalty(logprobs, reference, inputs, config.importance_cap)
            loss = loss + config.kl_coef * penalty
        if self.entropy.weight:
            bonus = entropy_term(scores.entropies, inputs["completion_mask"], tokens.trained)
            loss = loss - self.entropy.weight * bonus
        if config.context_loss is not None:
            loss = loss + context_loss(scored.logprobs, samples, tokens, config)
        if not one.counts:
            return loss * 0.0, None
        metrics.add(micro_batch, answers.rows, loss.detach(), inputs, scores._replace(logprobs=logprobs), reference)
        if loss.isfinite():
            return loss, None
        return loss, fault_of_loss([samples[row].rollout_id for row in answers.rows[:, 0]], inputs, logprobs)

    def _clip_gradients(self) -> float:
        """Clip each adapter's gradient by itself; returns the norm of all together, before clipping."""
        limit = self.args.max_grad_norm
        parts = [self.weight_sets.parameters(name) for name in self.weight_sets.names]
        return math.hypot(*(self.processes.clip(self.accelerator, part, limit) for part in parts))

    # Scoring -------------------------------------------------------------------------------------------------------

    def logprobs(
        self, token_ids: Sequence[Sequence[int]], adapter: str = DEFAULT_ADAPTER, *, served: bool = False
    ) -> list[list[float]]:
        """Return each token's log-probability at temperature 1 under an adapter; 0.0 for the first of each row.

        With `served`, score as if the adapter had the weights that `remember_served` copied last.
        """
        return self.scores_of([fully_scored(tuple(ids), adapter) for ids in token_ids], served=served)

    @on_every_shard
    @torch.no_grad()
    def scores_of(self, samples: Sequence[Sample], *, served: bool = False) -> list[list[float]]:
        """Return the log-probabilities of each row's answers, as they were sampled; 0.0 for all other tokens.

        `served`: as in `logprobs`.
        """
        self.model.eval()
        with ExitStack() as stack:
            for adapter in {sample.adapter for sample in samples} if served else ():
                stack.enter_context(self.weight_sets.exchanged(adapter, self._served[adapter]))
            return logprobs_of(samples, self._cost, self._score)

    @on_every_shard
    def remember_served(self, adapter: str = DEFAULT_ADAPTER) -> None:
        """Remember an adapter's present weights as served, for `logprobs` to score with later."""
        self._served[adapter] = self.weight_sets.copy(adapter)

    def _score(
        self, micro_batch: MicroBatch, model: PreTrainedModel | None = None, *, results: bool = False
    ) -> ScoredTokens:
        self.weight_sets.activate(micro_batch.adapter)
        with self.accelerator.autocast():
            bonus, tree, samples = self.entropy.weight > 0, micro_batch.tree, micro_batch.samples
            model = model or self.policy_model
            return score(model, tree, samples, self._shaper, entropy_gradient=bonus, results=results)

    @torch.no_grad()
    def _reference(self, micro_batch: MicroBatch) -> Tensor:
        """(B, T) log-probabilities under the base model, by the same pass."""
        self.model.eval()
        with self.weight_sets.reference() as base:
            logprobs = self._score(micro_batch, base).logprobs
        self.model.train()
        return logprobs

    # Weights and checkpoints ---------------------------------------------------------------------------------------

    @on_every_shard
    def adapter(self, name: str = DEFAULT_ADAPTER) -> Weights:
        """Return a copy of an adapter's weights; `default` is also the name of a full model's."""
        return self.weight_sets.weights(name)

    def adopt(self, step: int) -> None:
        """Note that the adapter was trained by other means, as `step`: the optimizer's old moments go."""
        self.optimizer.state.clear()
        self.state.global_step = step

    @on_every_shard
    def save(self, directory: Path) -> None:
        """Write weights, optimizer, scheduler, random state and step; `directory` appears atomically."""
        state = {
            "step": self.state.global_step,
            "adapters": self.weight_sets.all_weights(),
            "optimizer": self.weight_sets.optimizer_state(self.optimizer),
            "scheduler": self.lr_scheduler.state_dict(),
            "entropy": self.entropy.state(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
        }
        if self.processes.rank == 0:
            with atomic_directory(directory) as temporary:
                torch.save(state, temporary / STATE_FILE)
                write_config(temporary, self._saved_config, self.rate.value)

    def load(self, directory: Path) -> int:
        """Resume exactly from what `save` wrote; returns the step it was written after.

        A learning rate that is set counts; `auto` keeps the checkpoint's. Raises ConfigError, and changes nothing, if
        the checkpoint is damaged, or belongs to other adapters or to another base model than configured.
        """
        changed = config_changes(directory, self._saved_config)
        state = read_state(directory / STATE_FILE, self.weight_sets.shapes())
        if "optimizer" not in state:
            log.warning("%s has no optimizer state: its moments and the schedule begin anew", directory)
        if state["step"]:  # untrained weights have no rate to keep
            self.rate = self._rate_of(saved_rate(directory))
            self.args.learning_rate = self.rate.value
        self._read = state
        self._restore(without_values(state) if self.weight_sets.sharded else state, self.rate.value)
        self._read = None
        if changed:
            log.warning("the configuration changed since %s was written: %s", directory, ", ".join(changed))
        return int(state["step"])

    @on_every_process
    def _restore(self, state: State, rate: float) -> None:
        """Take the state and the rate; without the optimizer's state, its moments and the schedule begin anew."""
        state = self._read or state
        self.weight_sets.set(state["adapters"])
        if "optimizer" in state:
            self.weight_sets.load_optimizer_state(self.optimizer, state["optimizer"])
            self.lr_scheduler.load_state_dict(state["scheduler"])
        else:
            self.optimizer.state.clear()
            self.lr_scheduler.last_epoch = 0
        self._set_learning_rate(rate)
        self.entropy.load(state.get("entropy", {}))
        _set_random_state(state)
        self.state.global_step = state["step"]

    def _set_learning_rate(self, rate: float) -> None:
        rates = [rate] * len(self.optimizer.param_groups)
        self.lr_scheduler.base_lrs = rates
        for group, factor in zip(self.optimizer.param_groups, self.lr_scheduler.lr_lambdas, strict=True):
            group["initial_lr"] = rate
            group["lr"] = rate * factor(self.lr_scheduler.last_epoch)

    @on_every_shard
    def save_weights(self, directory: Path, *, merged: bool) -> None:
        """Write what vLLM loads: adapters, or with `merged` a full model."""
        self.weight_sets.save(directory, self.processing_class, merged=merged)

    def end(self) -> None:
        """Let the other processes end."""
        self.processes.end()

    def close(self) -> None:
        """Let the trackers finish their files."""
        self.trackers.close()


def without_values(state: State) -> State:
    """Return a state for processes that get their parts of sharded weights and moments from process 0."""
    large = {key: state[key] for key in SHARDED if key in state}
    return state | _on_meta(large)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta") if value.dim() else value
    if isinstance(value, dict):
        return {key: _on_meta(inner) for key, inner in value.items()}
    return [_on_meta(inner) for inner in value] if isinstance(value, list) else value


def _set_random_state(state: State) -> None:
    """Devices that were not there when the state was written keep the random state that they have."""
    torch.set_rng_state(state["rng"])
    for device, rng in zip(range(torch.cuda.device_count()), state.get("cuda_rng", ()), strict=False):
        torch.cuda.set_rng_state(rng, device)
