"""Takes the training steps on a service with the Tinker API. No model is loaded here."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from ...core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...trainer.checkpoint import atomic_directory, config_changes, saved_config, saved_rate, write_config
from ...trainer.rate import rate_after, rate_of
from ...trainer.report.trackers import Trackers
from ...trainer.step.losses import LossInputs, policy_loss, token_weights
from ...trainer.step.scoring import longest_sample
from ...trainer.step.step_metrics import SAMPLER_TOKENS, k3, nats_apart, some_rollouts, wrong_sampler
from ...trainer.types import Batch, Sample
from ...trainer.weights import tolerance
from .config import LOSSES, TinkerConfig
from .service import Datum, Scores, TinkerService, Weights, write_adapter

log = logging.getLogger(__name__)
STATE_FILE = "tinker.json"
# AdamW's defaults, which the local trainer takes.
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


class TinkerTrainer:
    """A `TrainingEngine` with its model on a service.

    After each step the service saves its state, and a checkpoint holds the path. The model resumes from a saved state
    only: whatever was sent since, and may or may not have been applied, is left behind with the model that it was sent
    to. So no step counts twice.
    """

    def __init__(self, config: TrainerConfig, policy: PolicyConfig) -> None:
        if policy.model is None:
            raise ConfigError("policy.model: the trainer needs a Hugging Face model id or directory")
        about = AutoConfig.from_pretrained(policy.model)
        # A service that does not say so computes in bfloat16.
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        longest = longest_sample(about, config.max_sample_tokens)
        self.settings = config.model_copy(update={"max_sample_tokens": longest, "dtype": dtype})
        self.max_tokens, self.vocabulary = longest, int(about.get_text_config().vocab_size)
        self.trackers = Trackers(config, policy.directory / "trainer")
        self._rate_of = partial(rate_of, config, int(about.get_text_config().hidden_size))
        self.rate = self._rate_of()
        self.skipped_because: str | None = None
        self.left_out_because: str | None = None
        self.warnings: dict[str, str] = {}
        self._tolerance = tolerance(self.settings, policy)
        tinker = config.section(TinkerConfig)
        self._model, base_model = policy.model, tinker.base_model or policy.model
        self._service = TinkerService(tinker, base_model, config.lora_rank, config.seed)
        self._saved_config = saved_config(config, policy, f"of a Tinker service: {base_model}")
        self._state: str | None = None  # the path of what the service saved last
        self._step = self._updates = 0
        self._published: Weights = {}
        self._computed: tuple[Batch, dict[str, float]] | None = None

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on `batch`. Return its metrics together with the batch's own."""
        self.forward_backward(batch)
        return self.optim_step()

    def forward_backward(self, batch: Batch) -> None:
        """Have the service compute a batch's gradients.

        Rollouts that were not sampled at temperature 1 alone are left out: the service scores no other.
        """
        begun = time.perf_counter()
        trained = [sample for sample in batch.samples if sample.trained_tokens]
        samples = [sample for sample in trained if is_plain(sample)]
        others = [sample.rollout_id for sample in trained if not is_plain(sample)]
        why = "the training service scores answers as they are sampled at temperature 1, with no top_p and the like"
        self.left_out_because = f"{why}: {some_rollouts(others)} left out" if others else None
        bad = [s.rollout_id for s in samples if not all(map(math.isfinite, (*s.logprobs, *s.advantages)))]
        self.warnings, self.skipped_because = {}, None
        metrics: dict[str, float] = {"trained_tokens": 0.0, "computed_tokens": 0.0}
        if not samples:
            self.skipped_because = self.left_out_because or "it has no trainable tokens"
        elif bad:
            self.skipped_because = f"log-probabilities or advantages not finite in {some_rollouts(bad)}"
        else:
            metrics |= self._gradients(samples, batch)
        metrics["forward_backward_s"] = time.perf_counter() - begun
        self._computed = batch, metrics

    def _gradients(self, samples: Sequence[Sample], batch: Batch) -> dict[str, float]:
        """Return the metrics of the forward pass. If the step is to be skipped, the service forgets the gradients."""
        config = self.settings
        weights = token_weights(samples, config, batch.compared)
        rows = rows_of(samples, weights, config.section(TinkerConfig).reduction)
        self._service.ready(self._state)
        low, high = clip_limits(config)
        limits = {"clip_low_threshold": low, "clip_high_threshold": high}
        logprobs = self._service.forward_backward(rows, LOSSES[config.loss_type], limits)
        metrics = numbers_of(samples, logprobs, weights, config)
        fresh = [sample.versions == (batch.version,) for sample in samples]
        of_fresh = numbers_of([*compress(samples, fresh)], [*compress(logprobs, fresh)], weights, config)
        metrics["sampler_difference"] = nats_apart(of_fresh["kl"])
        if not math.isfinite(metrics["loss"]):
            self.skipped_because = f"the loss is not finite over {some_rollouts([s.rollout_id for s in samples])}"
        elif of_fresh["trained_tokens"] >= SAMPLER_TOKENS:
            self.skipped_because = wrong_sampler(of_fresh["kl"], self._tolerance)
            self.warnings = {"sampler": self.skipped_because} if self.skipped_because else {}
        if self.skipped_because is not None:
            self._service.forget()  # with the gradients that it has
        return metrics | {"computed_tokens": float(sum(len(row.tokens) for row in rows))}

    def optim_step(self) -> dict[str, float]:
        """Take the step on the service, and save its state there. Return the metrics together with the batch's own.

        If a number is not finite, the weights stay as they are and `skipped` is 1.
        """
        assert self._computed is not None, "forward_backward comes first"
        (batch, metrics), self._computed = self._computed, None
        begun, rate = time.perf_counter(), rate_after(self.settings, self.rate.value, self._updates)
        metrics |= {"lr": rate, "skipped": float(self.skipped_because is not None)}
        if self.skipped_because is None:
            limit = self.settings.max_grad_norm
            reported = self._service.optim_step(learning_rate=rate, grad_clip_norm=limit, **ADAM)
            self._updates += 1
            self._state = self._service.save_state(self._name())
            norms = [value for name, value in reported.items() if "grad_norm" in name]
            metrics |= {"grad_norm": norms[0]} if norms else {}
        metrics["optimizer_s"] = time.perf_counter() - begun
        self._step = self.trackers.step = batch.step
        metrics["step_s"] = metrics["forward_backward_s"] + metrics["optimizer_s"]
        for name in ("trained_tokens", "computed_tokens"):
            metrics[f"{name}_per_s"] = metrics[name] / metrics["step_s"]
        return {name: value for name, value in {**batch.metrics, **metrics}.items() if math.isfinite(value)}

    def _name(self) -> str:
        return f"lightning-{self._updates:06}-{secrets.token_hex(4)}"

    def logprobs(
        self, token_ids: Sequence[Sequence[int]], adapter: str = DEFAULT_ADAPTER, *, served: bool = False
    ) -> list[list[float]]:
        """Return each token's log-probability at temperature 1; 0.0 for the first of each row.

        The service has the present weights only, also for `served`.
        """
        rows = {i: Datum(tuple(ids[:-1]), tuple(ids[1:])) for i, ids in enumerate(token_ids) if len(ids) > 1}
        self._service.ready(self._state)
        found = dict(zip(rows, self._service.logprobs([*rows.values()]) if rows else [], strict=True))
        return [[0.0] * min(len(ids), 1) + found.get(i, []) for i, ids in enumerate(token_ids)]

    def scores_of(self, samples: Sequence[Sample], *, served: bool = False) -> list[list[float]]:
        """Return the log-probabilities of each row's answers, at temperature 1; 0.0 for all other tokens."""
        found = self.logprobs([sample.token_ids for sample in samples])
        return [[v * m for v, m in zip(row, s.mask, strict=True)] for row, s in zip(found, samples, strict=True)]

    def remember_served(self, adapter: str = DEFAULT_ADAPTER) -> None:
        """Do nothing: the service would need a second model to score with earlier weights."""

    def adapter(self, name: str = DEFAULT_ADAPTER) -> Mapping[str, Tensor]:
        """Return the weights that the service returned last."""
        return self._published

    def save_weights(self, directory: Path, *, merged: bool) -> None:
        """Write the adapter that vLLM loads."""
        if merged:
            raise ConfigError("policy.publish: merged needs tinker.enabled: false; a Tinker service trains adapters")
        self._service.ready(self._state)
        self._published = write_adapter(self._service.adapter_files(self._name()), self._model, directory)

    def save(self, directory: Path) -> None:
        """Write where the service has its state; `directory` appears atomically."""
        if self._state is None:
            self._service.ready(None)
            self._state = self._service.save_state(self._name())
        state = {"step": self._step, "updates": self._updates, "state": self._state}
        with atomic_directory(directory) as temporary:
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=1))
            write_config(temporary, self._saved_config, self.rate.value)

    def load(self, directory: Path) -> int:
        """Resume exactly from what `save` wrote; returns the step it was written after.

        Raises ConfigError, and changes nothing, if the checkpoint is damaged or belongs to another model.
        """
        changed = config_changes(directory, self._saved_config)
        try:
            kept = json.loads((directory / STATE_FILE).read_text())
            state, step, updates = str(kept["state"]), int(kept["step"]), int(kept["updates"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the checkpoint {directory} is damaged ({error}): restore it from a backup, or start with "
                "another store.url and policy.directory"
            ) from None
        self._service.forget()
        self._state, self._step, self._updates = state, step, updates
        self.trackers.step = step
        if step:  # untrained weights have no rate to keep
            self.rate = self._rate_of(saved_rate(directory))
            self._service.ready(state)
        if changed:
            log.warning("the configuration changed since %s was written: %s", directory, ", ".join(changed))
        return step

    def end(self) -> None:
        """Do nothing: no other process waits for this one."""

    def close(self) -> None:
        """Leave the service, and let the trackers finish their files."""
        self._service.forget()
        self.trackers.close()


def is_plain(sample: Sample) -> bool:
    """Return whether all of its answers were sampled at temperature 1 and nothing else."""
    return not sample.shaped and all(value == 1.0 for value in compress(sample.temperatures, sample.mask))


def rows_of(samples: Sequence[Sample], weights: Mapping[str, float], reduction: str) -> list[Datum]:
    """Return the rows of a step. `weights`: of a token, by rollout.

    Every loss of the service is linear in the advantage, so the weights go into it. Where the service takes the `mean`
    over a row's tokens and then over the rows, instead of the `sum`, the advantages undo that.
    """
    rows = []
    for sample in samples:
        ids, weight = sample.token_ids, weights[sample.rollout_id]
        if reduction == "mean":
            weight *= (len(ids) - 1) * len(samples)
        advantages = tuple(weight * value for value in sample.advantages[1:])
        rows.append(Datum(ids[:-1], ids[1:], sample.logprobs[1:], advantages))
    return rows


def clip_limits(config: TrainerConfig) -> tuple[float, float]:
    """Return the least and greatest importance ratio that are not clipped."""
    if LOSSES[config.loss_type] == "cispo":
        return 0.0, min(config.cap, 1e6)  # JSON has no infinity
    return 1 - config.clip_low, 1 + config.clip_high


def numbers_of(
    samples: Sequence[Sample], logprobs: Scores, weights: Mapping[str, float], config: TrainerConfig
) -> dict[str, float]:
    """Return a step's loss, ratios and KL by the names of `metric_schema`. `logprobs` are the policy's, by target."""

    def row(values: Iterable[Iterable[float]]) -> Tensor:
        return torch.tensor([[*chain.from_iterable(values)]], dtype=torch.float64)

    of_tokens = row([weights[sample.rollout_id]] * (len(sample.token_ids) - 1) for sample in samples)
    sampled, mask = row(sample.logprobs[1:] for sample in samples), row(sample.mask[1:] for sample in samples)
    advantages = row(sample.advantages[1:] for sample in samples)
    given, kept = LossInputs(row(logprobs), sampled, advantages, mask, config, weights=of_tokens), mask.bool()
    ratios, pulled, (low, high) = given.ratios[kept], advantages[kept], clip_limits(config)
    clipped = (ratios < low) & (pulled < 0) | (ratios > high) & (pulled > 0)
    n = max(len(ratios), 1)
    return {
        "loss": float(policy_loss(given)),
        "kl": float(k3((given.logprobs - sampled)[kept]).sum()) / n,
        "ratio_mean": float(ratios.sum()) / n,
        "ratio_max": max(ratios.tolist(), default=0.0),
        "clip_share": float(clipped.sum()) / n,
        "trained_tokens": float(len(ratios)),
    }
