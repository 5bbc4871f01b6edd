"""LightningRL on TRL's GRPOTrainer: rows come from the store, and one call of `step` is one optimizer step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from ...proxy.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ...proxy.config.trainer import TrainerConfig
from ...proxy.errors import ConfigError
from ..distributed.ranks import alone, on_every_rank, on_every_shard, prepare
from ..distributed.shares import turns
from ..files import saved_config
from ..files.checkpoint import whole_directory
from ..files.weights import save_adapter, save_merged
from ..report.metric_schema import by_tag
from ..report.trackers import PROJECT, Run, check_trackers
from ..rows.microbatches import MicroBatch, TreeCost, micro_batches
from ..types import Batch, Sample
from .adapters import Adapters, Weights
from .finite import fault_of_loss, named
from .losses import Answers, kl_penalty, loss_arguments, loss_inputs, token_weights
from .scoring import Scores, attention_cost, check_tree_support, score
from .step_metrics import StepMetrics

log = logging.getLogger(__name__)

STATE_FILE = "state.pt"


class LightningTrainer(GRPOTrainer):
    """GRPOTrainer driven from outside: `step`, `save`, `load`, `logprobs`, `close` instead of `train()`.

    The loss is TRL's own, as `losses.py` lays it out; its ratios are against the policies that sampled the answers.
    """

    model: Any
    optimizer: Any
    control: Any
    accelerator: Any

    def __init__(self, config: TrainerConfig, policy: PolicyConfig) -> None:
        if policy.model is None:
            raise ConfigError("policy.model: the trainer needs a Hugging Face model id or directory")
        if config.threads:
            torch.set_num_threads(config.threads)
        check_trackers(config.report_to)
        self._run = Run(policy.directory / "trainer")
        self._run.go_on(config.report_to)
        tokenizer = AutoTokenizer.from_pretrained(policy.model)
        super().__init__(
            model=policy.model,
            args=_grpo_config(config, policy.directory / "trainer", self._run.name),
            # TRL wants both and would use them in `train()`, which is never called.
            reward_funcs=_rewards_come_from_the_store,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=tokenizer,
            peft_config=_lora_config(config),
        )
        self.settings = config
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self._run.in_one_place(self.callback_handler)
        self.adapters = Adapters(self.peft_model, policy.adapters)
        self.create_optimizer_and_scheduler(num_training_steps=config.max_steps or 10**9)
        self._saved_config = saved_config.saved_config(config, policy, saved_config.fingerprint(self.model))
        self.model, self.optimizer, self.ranks = prepare(self.accelerator, self.model, self.optimizer)
        self.current_gradient_accumulation_steps = 1
        # After the constructor, which would warn of a normalisation that is not used here.
        self.importance_sampling_level = config.importance_level
        self.skipped_because: str | None = None
        self._scores: Scores | None = None
        check_tree_support(self.policy_model.config, config.max_sample_tokens)
        self._cost = TreeCost(
            attention_cost(self.policy_model.config, self.policy_model.num_parameters(exclude_embeddings=True)),
            config.max_tokens_per_batch,
        )
        self._begun = False

    @property
    def peft_model(self) -> PeftModel:
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, PeftModel)
        return model

    @property
    def policy_model(self) -> PreTrainedModel:
        """The bare causal LM, with LoRA layers in it."""
        model = self.peft_model.get_base_model()
        assert isinstance(model, PreTrainedModel)
        return model

    @property
    def max_tokens(self) -> int:
        """The longest sample that the model and the configuration take."""
        context = getattr(self.policy_model.config.get_text_config(), "max_position_embeddings", None)
        return min(self.settings.max_sample_tokens, context or self.settings.max_sample_tokens)

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has embeddings of."""
        return int(self.policy_model.get_input_embeddings().num_embeddings)

    @on_every_rank
    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on `batch`; returns its metrics together with the batch's own.

        Each adapter's update is the one that it would get from its own samples alone; without any, it stays as it is.
        A loss or gradient that is not finite leaves weights, optimizer and scheduler untouched: `skipped` is 1, and
        what is not finite is missing from the metrics; `skipped_because` then says what, and in which rollouts.
        """
        metrics = StepMetrics(time.perf_counter(), self.settings)
        self.model.train()
        self.optimizer.zero_grad()
        weights = {adapter: self._token_weights(batch, adapter) for adapter in self.adapters.names}
        samples = [sample for sample in batch.samples if sample.trained_tokens]
        metrics.fault = None if samples else "it has no trainable tokens"
        for micro_batch, counts in turns(micro_batches(samples, self._cost), self._cost, self.ranks):
            loss = self._loss(micro_batch, weights[micro_batch.adapter], metrics if counts else None)
            if not metrics.finite and not self.ranks.sharded:
                break
            self.accelerator.backward(loss)
        metrics = metrics.sum(self.ranks.gathered(metrics))
        if samples and metrics.finite:
            self.ranks.sum_gradients(self.adapters.parameters())
            metrics.grad_norm = self._clip_gradients()  # on a GPU this waits for the backward passes
            if not metrics.finite:
                metrics.fault = f"the gradient is not finite over {named([s.rollout_id for s in samples])}"
        metrics.forward_backward_s = metrics.elapsed
        metrics.learning_rate = self._get_learning_rate()
        metrics.skipped = not samples or not metrics.finite
        self.skipped_because = metrics.fault
        if not metrics.skipped:
            self.optimizer.step()
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        metrics.optimizer_s = metrics.elapsed - metrics.forward_backward_s
        self.state.global_step = batch.step
        found = {**batch.metrics, **metrics.result()}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def begin(self) -> None:
        """Let the trackers (`trainer.report_to`) begin, or go on with, their run; ConfigError if one cannot."""
        if self._begun:
            return
        try:
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        except Exception as error:  # whatever a tracker raises without its key, its server, its disk
            raise ConfigError(f"trainer.report_to: {', '.join(self.args.report_to)}: {_one_line(error)}") from error
        self._begun = True
        if self.args.report_to:
            self._run.begun()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Send the last step's numbers to the trackers, by the tags of `metric_schema`; where that fails, say so."""
        self.begin()
        self._metrics["train"].clear()  # TRL's own, under names that vary with the loss
        try:
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, by_tag(metrics))
        except Exception as error:
            log.warning("step %d did not reach every tracker: %s", self.state.global_step, _one_line(error))

    def _token_weights(self, batch: Batch, adapter: str) -> dict[str, float]:
        """By rollout, as if the adapter's samples were all that there are."""
        own = [sample for sample in batch.samples if sample.adapter == adapter]
        return token_weights(own, self.settings, batch.compared_by_adapter.get(adapter, batch.compared))

    def _clip_gradients(self) -> float:
        """Clip each adapter's gradient by itself; returns the norm of all together, before that."""
        limit = self.args.max_grad_norm
        parts = [self.adapters.parameters(name) for name in self.adapters.names]
        return math.hypot(*(float(self.accelerator.clip_grad_norm_(part, limit)) for part in parts))

    def adapter(self, name: str = DEFAULT_ADAPTER) -> Weights:
        """A copy of an adapter's weights."""
        return self.adapters.weights(name)

    def adopt(self, step: int) -> None:
        """The adapter was trained by other means, as `step`: the optimizer's moments, which are of before, go."""
        self.optimizer.state.clear()
        self.state.global_step = step

    @on_every_shard
    @torch.no_grad()
    def logprobs(
        self, token_ids: Sequence[Sequence[int]], weights: Weights | None = None, adapter: str = DEFAULT_ADAPTER
    ) -> list[list[float]]:
        """Log-probability of every token at temperature 1 under an adapter; 0.0 for each row's first.

        `weights`: score as if the adapter had these.
        """
        if weights is not None:
            current = self.adapter(adapter)
            self.adapters.set({adapter: weights})
            try:
                return self.logprobs(token_ids, adapter=adapter)
            finally:
                self.adapters.set({adapter: current})
        self.model.eval()
        rows = [_fully_scored(str(i), tuple(ids), adapter) for i, ids in enumerate(token_ids) if len(ids) > 1]
        found: dict[str, list[float]] = {}
        for micro_batch in micro_batches(rows, self._cost):
            for sample, values in zip(micro_batch.samples, self._score(micro_batch).logprobs.tolist(), strict=True):
                found[sample.rollout_id] = values[: len(sample.token_ids)]
        return [found.get(str(i), [0.0] * len(ids)) for i, ids in enumerate(token_ids)]

    def save(self, directory: Path) -> None:
        """Write adapters, optimizer, scheduler, random state and step; `directory` appears whole or not at all."""
        with whole_directory(directory) as temporary:
            state = {
                "step": self.state.global_step,
                "adapters": self.adapters.all_weights(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.lr_scheduler.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all(),
            }
            torch.save(state, temporary / STATE_FILE)
            saved_config.write(temporary, self._saved_config)

    def load(self, directory: Path) -> int:
        """Go on from what `save` wrote, exactly; returns the step it was written after.

        ConfigError, and nothing changed, if it is damaged, or of other adapters or another base model than configured.
        """
        changed = saved_config.changes(directory, self._saved_config)
        state = saved_config.read_state(directory / STATE_FILE, self.adapters.all_weights())
        if "optimizer" not in state:
            log.warning("%s has no optimizer state: its moments and the schedule begin anew", directory)
        self._restore(state)
        if changed:
            log.warning("the configuration changed since %s was written: %s", directory, ", ".join(changed))
        return int(state["step"])

    @on_every_rank
    def _restore(self, state: dict[str, Any]) -> None:
        self.adapters.set(state["adapters"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
            self.lr_scheduler.load_state_dict(state["scheduler"])
        else:
            self.optimizer.state.clear()
            self.lr_scheduler.last_epoch = 0
        self._set_learning_rate()
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.state.global_step = state["step"]

    @on_every_shard
    def save_weights(self, directory: Path, *, merged: bool) -> None:
        """Write what vLLM loads: the adapters, or the whole model with the one of all agents merged in."""
        if merged:
            save_merged(self.peft_model, self.processing_class, directory, writes=self.ranks.rank == 0)
        elif self.ranks.rank == 0:
            save_adapter(self.peft_model, directory)

    def _set_learning_rate(self) -> None:
        """The configured rate counts, not the one that a checkpoint was written with."""
        rates = [self.args.learning_rate] * len(self.optimizer.param_groups)
        self.lr_scheduler.base_lrs = rates
        for group, rate, factor in zip(self.optimizer.param_groups, rates, self.lr_scheduler.lr_lambdas, strict=True):
            group["initial_lr"] = rate
            group["lr"] = rate * factor(self.lr_scheduler.last_epoch)
        self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def close(self) -> None:
        """Let the callbacks (TensorBoard and other reports) finish their files."""
        if self._begun:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            self._begun = False

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        """What TRL's loss asks for, from the prefix tree's one forward pass: (A, L) twice, and no router loss."""
        assert self._scores is not None, "step() scores a micro-batch before it asks for its loss"
        return *self._scores, None

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """TRL's, of this rank's samples alone: it would wait for the other ranks in every micro-batch."""
        everybody, self.accelerator = self.accelerator, alone(self.accelerator)
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        finally:
            self.accelerator = everybody

    def _score(self, micro_batch: MicroBatch) -> Scores:
        self.adapters.activate(micro_batch.adapter)
        with self.accelerator.autocast():
            return score(self.policy_model, micro_batch.tree, micro_batch.samples)

    def _loss(self, micro_batch: MicroBatch, weights: dict[str, float], metrics: StepMetrics | None) -> Tensor:
        """What the micro-batch adds to the loss of the step, and to its metrics; nothing without them."""
        samples, config = micro_batch.samples, self.settings
        answers = Answers.of(samples, self.accelerator.device)
        inputs = loss_inputs(samples, answers, weights, config)
        # Before the policy's own pass: where layers are computed again for the gradient, the adapter must be on.
        reference = answers.take(self._reference(micro_batch)) if config.kl_coef or config.kl_metric else None
        self._scores = Scores(*map(answers.take, self._score(micro_batch)))
        loss: Tensor = self._compute_loss(self.model, inputs)
        if config.kl_coef and reference is not None:
            penalty = kl_penalty(self._scores.logprobs, reference, inputs, config.importance_cap)
            loss = loss + config.kl_coef * penalty
        if metrics is None:
            return loss * 0.0
        metrics.add(micro_batch, loss.detach(), inputs, self._scores, reference)
        if not metrics.finite:
            parts = {
                "captured log-probabilities": inputs["old_per_token_logps"],
                "advantages": inputs["advantages"],
                "the policy's log-probabilities": self._scores.logprobs,
            }
            metrics.fault = fault_of_loss([samples[row].rollout_id for row in answers.rows[:, 0]], parts)
        return loss

    @torch.no_grad()
    def _reference(self, micro_batch: MicroBatch) -> Tensor:
        """(B, T) log-probabilities under the base model: the same pass, the adapter off."""
        with self.peft_model.disable_adapter():
            return self._score(micro_batch).logprobs


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())


def _fully_scored(name: str, token_ids: tuple[int, ...], adapter: str) -> Sample:
    n = len(token_ids)
    mask, zeros, ones = (0,) + (1,) * (n - 1), (0.0,) * n, (1.0,) * n
    return Sample(name, name, token_ids, mask, zeros, zeros, ones, adapter=adapter)


def _rewards_come_from_the_store(**_: Any) -> list[float]:
    raise NotImplementedError("rewards are posted to the proxy; call step(), not train()")


def _lora_config(config: TrainerConfig) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.lora_targets,
    )


def _grpo_config(config: TrainerConfig, output_dir: Path, run_name: str) -> GRPOConfig:
    cuda = torch.cuda.is_available()
    dtype = {"auto": "bfloat16" if cuda else "float32"}.get(config.dtype, config.dtype)
    return GRPOConfig(
        output_dir=str(output_dir),
        model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
        use_cpu=not cuda,
        bf16=cuda and dtype == "bfloat16",
        gradient_checkpointing=cuda,
        **loss_arguments(config),
        disable_dropout=True,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler,
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        report_to=config.report_to or "none",
        run_name=run_name,
        project=PROJECT,
        # Of no effect outside `train()`, but TRL checks that they fit together.
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=config.max_steps or 10**9,
        save_strategy="no",
        disable_tqdm=True,
    )
