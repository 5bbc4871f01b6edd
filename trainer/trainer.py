"""LightningRL on TRL's GRPOTrainer: rows come from the store, and one call of `step` is one optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from lightning_proxy.proxy.config import PolicyConfig, TrainerConfig
from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.trainer.checkpoint import whole_directory
from lightning_proxy.trainer.microbatches import MicroBatch, TreeCost, micro_batches
from lightning_proxy.trainer.ranks import alone, on_every_rank, on_every_shard, prepare
from lightning_proxy.trainer.samples import rollout_weights
from lightning_proxy.trainer.scoring import Scores, attention_cost, check_tree_support, score
from lightning_proxy.trainer.shares import turns
from lightning_proxy.trainer.step_metrics import StepMetrics
from lightning_proxy.trainer.types import Batch, Sample
from lightning_proxy.trainer.weights import save_adapter, save_merged

STATE_FILE = "state.pt"


class LightningTrainer(GRPOTrainer):
    """GRPOTrainer driven from outside: `step`, `save`, `load`, `logprobs`, `close` instead of `train()`.

    The loss is TRL's own; every rollout weighs the same in it. `cispo`: importance weights against the sampling policy,
    truncated at `importance_cap`. `grpo`: ratios against the sampling policy clipped to [1 - clip_low, 1 + clip_high],
    and at `importance_cap` where the advantage is negative.
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
        tokenizer = AutoTokenizer.from_pretrained(policy.model)
        super().__init__(
            model=policy.model,
            args=_grpo_config(config, policy.directory / "trainer"),
            # TRL wants both and would use them in `train()`, which is never called.
            reward_funcs=_rewards_come_from_the_store,
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            processing_class=tokenizer,
            peft_config=_lora_config(config),
        )
        self.settings = config
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.create_optimizer_and_scheduler(num_training_steps=config.max_steps or 10**9)
        self.model, self.optimizer, self.ranks = prepare(self.accelerator, self.model, self.optimizer)
        self.current_gradient_accumulation_steps = 1
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

    @on_every_rank
    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on `batch`; returns its metrics together with the batch's own, and logs them.

        A loss or gradient that is not finite leaves weights, optimizer and scheduler untouched: `skipped` is 1, and
        what is not finite is missing from the metrics.
        """
        metrics = StepMetrics(time.perf_counter(), self._weight_limits())
        self.model.train()
        self.optimizer.zero_grad()
        weights = rollout_weights(batch.samples)
        samples = [sample for sample in batch.samples if sample.rollout_id in weights and sample.trained_tokens]
        for micro_batch, counts in turns(micro_batches(samples, self._cost), self._cost, self.ranks):
            inputs = self._inputs(micro_batch, weights, batch.compared or len(weights))
            self._scores = self._score(micro_batch)
            loss = self._compute_loss(self.model, inputs)
            if counts:
                metrics.add(micro_batch, loss.detach(), inputs, self._scores)
            else:
                loss = loss * 0.0
            if not metrics.finite and not self.ranks.sharded:
                break
            self.accelerator.backward(loss)
        metrics = metrics.sum(self.ranks.gathered(metrics))
        if samples and metrics.finite:
            self.ranks.sum_gradients(self._trained)
            metrics.grad_norm = float(self.accelerator.clip_grad_norm_(self._trained, self.args.max_grad_norm))
        metrics.learning_rate = self._get_learning_rate()
        metrics.skipped = not samples or not metrics.finite
        if not metrics.skipped:
            self.optimizer.step()
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.state.global_step = batch.step
        return self._report({**batch.metrics, **metrics.result()})

    def adapter(self) -> dict[str, Tensor]:
        """A copy of the adapter's weights."""
        return {name: value.clone() for name, value in get_peft_model_state_dict(self.peft_model).items()}

    @on_every_shard
    @torch.no_grad()
    def logprobs(
        self, token_ids: Sequence[Sequence[int]], adapter: dict[str, Tensor] | None = None
    ) -> list[list[float]]:
        """Log-probability of every token at temperature 1 under the current policy; 0.0 for each row's first.

        `adapter`: score with these weights instead.
        """
        if adapter is not None:
            current = self.adapter()
            set_peft_model_state_dict(self.peft_model, adapter)
            try:
                return self.logprobs(token_ids)
            finally:
                set_peft_model_state_dict(self.peft_model, current)
        self.model.eval()
        rows = [_fully_scored(str(i), tuple(ids)) for i, ids in enumerate(token_ids) if len(ids) > 1]
        found: dict[str, list[float]] = {}
        for micro_batch in micro_batches(rows, self._cost):
            for sample, values in zip(micro_batch.samples, self._score(micro_batch).logprobs.tolist(), strict=True):
                found[sample.rollout_id] = values[: len(sample.token_ids)]
        return [found.get(str(i), [0.0] * len(ids)) for i, ids in enumerate(token_ids)]

    def save(self, directory: Path) -> None:
        """Write adapter, optimizer, scheduler, random state and step; `directory` appears whole or not at all."""
        with whole_directory(directory) as temporary:
            state = {
                "step": self.state.global_step,
                "adapter": get_peft_model_state_dict(self.peft_model),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.lr_scheduler.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all(),
            }
            torch.save(state, temporary / STATE_FILE)

    def load(self, directory: Path) -> int:
        """Go on from what `save` wrote, exactly; returns the step it was written after."""
        state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True)
        self._restore(state)
        return int(state["step"])

    @on_every_rank
    def _restore(self, state: dict[str, Any]) -> None:
        set_peft_model_state_dict(self.peft_model, state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["scheduler"])
        self._set_learning_rate()
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.state.global_step = state["step"]

    @on_every_shard
    def save_weights(self, directory: Path, *, merged: bool) -> None:
        """Write what vLLM loads: the adapter, or the whole model with the adapter merged in."""
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
        """What TRL's loss asks for, from the prefix tree's one forward pass: (B, T - 1) twice, and no router loss."""
        assert self._scores is not None, "step() scores a micro-batch before it asks for its loss"
        return self._scores.logprobs[:, 1:], self._scores.entropies[:, 1:], None

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """TRL's, of this rank's samples alone: it would wait for the other ranks in every micro-batch."""
        everybody, self.accelerator = self.accelerator, alone(self.accelerator)
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        finally:
            self.accelerator = everybody

    def _score(self, micro_batch: MicroBatch) -> Scores:
        with self.accelerator.autocast():
            return score(self.policy_model, micro_batch.tree, micro_batch.samples)

    def _inputs(self, micro_batch: MicroBatch, weights: dict[str, float], rollouts: int) -> dict[str, Tensor]:
        """TRL's inputs: the first token, never trained, as the prompt; the others, (B, T - 1), as completion."""
        samples, device = micro_batch.samples, self.accelerator.device
        ids = _padded([s.token_ids for s in samples], torch.int64, device)
        present = _padded([[1] * len(s.token_ids) for s in samples], torch.int64, device)
        scaled = [[a * weights[s.rollout_id] for a in s.advantages] for s in samples]
        return {
            "prompt_ids": ids[:, :1],
            "prompt_mask": present[:, :1],
            "completion_ids": ids[:, 1:],
            "completion_mask": present[:, 1:],
            "tool_mask": _padded([s.mask for s in samples], torch.int64, device)[:, 1:],
            "advantages": _padded(scaled, torch.float32, device)[:, 1:],
            "old_per_token_logps": _padded([s.logprobs for s in samples], torch.float32, device)[:, 1:],
            "num_items_in_batch": torch.tensor(float(rollouts), device=device),
        }

    def _weight_limits(self) -> tuple[float, float]:
        """Importance ratios outside of these are clipped or truncated."""
        config = self.settings
        if config.loss_type == "cispo":
            return 0.0, config.importance_cap
        return 1 - config.clip_low, 1 + config.clip_high

    def _report(self, metrics: dict[str, float]) -> dict[str, float]:
        if not self._begun:
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            self._begun = True
        self._metrics["train"].clear()  # TRL's own, under names that vary with the loss
        self.model.train()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.log(dict(finite))  # by rank 0 alone
        return finite


def _fully_scored(name: str, token_ids: tuple[int, ...]) -> Sample:
    n = len(token_ids)
    return Sample(name, name, token_ids, (0,) + (1,) * (n - 1), (0.0,) * n, (0.0,) * n, (1.0,) * n)


def _rewards_come_from_the_store(**_: Any) -> list[float]:
    raise NotImplementedError("rewards are posted to the proxy; call step(), not train()")


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(B, T), zeros on the right."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)


def _lora_config(config: TrainerConfig) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.lora_targets,
    )


def _grpo_config(config: TrainerConfig, output_dir: Path) -> GRPOConfig:
    cuda = torch.cuda.is_available()
    dtype = {"auto": "bfloat16" if cuda else "float32"}.get(config.dtype, config.dtype)
    clip_high = config.importance_cap if config.loss_type == "cispo" else config.clip_high
    return GRPOConfig(
        output_dir=str(output_dir),
        model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
        use_cpu=not cuda,
        bf16=cuda and dtype == "bfloat16",
        gradient_checkpointing=cuda,
        # "dapo" and "cispo" divide the sum over tokens by a number of our choosing: the rollouts of the step.
        loss_type="cispo" if config.loss_type == "cispo" else "dapo",
        epsilon=config.clip_low,
        epsilon_high=clip_high,
        delta=None if config.loss_type == "cispo" else max(config.importance_cap, 1 + config.clip_high),
        beta=0.0,
        disable_dropout=True,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler,
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        report_to=config.report_to or "none",
        # Of no effect outside `train()`, but TRL checks that they fit together.
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=config.max_steps or 10**9,
        save_strategy="no",
        disable_tqdm=True,
    )
