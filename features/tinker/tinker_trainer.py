"""Takes the training steps on a service with the Tinker API. No model is loaded here."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from ...core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...trainer.checkpoint import atomic_directory, config_changes, saved_config, saved_rate, write_config
from ...trainer.rate import rate_after, rate_of
from ...trainer.report.trackers import Trackers
from ...trainer.step.losses import token_weights
from ...trainer.step.scoring import longest_sample
from ...trainer.step.step_metrics import SAMPLER_TOKENS, nats_apart, some_rollouts, wrong_sampler
from ...trainer.types import Batch, Sample
from ...trainer.weights import tolerance
from .config import TinkerConfig
from .rows import Datum, is_plain, loss_config, loss_of, numbers_of, rows_of
from .service import TinkerService, Weights, read_adapter, write_adapter

log = logging.getLogger(__name__)
STATE_FILE = "tinker.json"
# AdamW's defaults, which the local trainer takes.
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


class TinkerTrainer:
    """A `TrainingEngine` whose model is on a service.

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
        self.trackers.args.learning_rate = self.rate.value
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

    # Training ------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on `batch`. Return its metrics together with the batch's own."""
        self.forward_backward(batch)
        return self.optim_step()

    def forward_backward(self, batch: Batch) -> None:
        """Have the service compute a batch's gradients.

        Rollouts that were not sampled at temperature 1 alone are left out.
        """
        begun = time.perf_counter()
        samples = self._fitting(batch)
        metrics: dict[str, float] = {"trained_tokens": 0.0, "computed_tokens": 0.0}
        self.skipped_because, self.warnings = self._fault(samples), {}
        if self.skipped_because is None:
            metrics |= self._gradients(samples, batch)
        metrics["forward_backward_s"] = time.perf_counter() - begun
        self._computed = batch, metrics

    def optim_step(self) -> dict[str, float]:
        """Take the step on the service, and save its state there. Return the metrics together with the batch's own.

        If a number is not finite, the weights stay as they are and `skipped` is 1.
        """
        assert self._computed is not None, "forward_backward comes first"
        (batch, metrics), self._computed = self._computed, None
        begun, rate = time.perf_counter(), rate_after(self.settings, self.rate.value, self._updates)
        metrics |= {"lr": rate, "skipped": float(self.skipped_because is not None)}
        if self.skipped_because is None:
            metrics |= self._take(rate)
        metrics["optimizer_s"] = time.perf_counter() - begun
        self._step = self.trackers.state.global_step = batch.step
        metrics["step_s"] = metrics["forward_backward_s"] + metrics["optimizer_s"]
        for name in ("trained_tokens", "computed_tokens"):
            metrics[f"{name}_per_s"] = metrics[name] / metrics["step_s"]
        return {name: value for name, value in {**batch.metrics, **metrics}.items() if math.isfinite(value)}

    def _fitting(self, batch: Batch) -> list[Sample]:
        """The samples that can be trained on; `left_out_because` counts the others."""
        trained = [sample for sample in batch.samples if sample.trained_tokens]
        plain = [sample for sample in trained if is_plain(sample)]
        others = [sample.rollout_id for sample in trained if not is_plain(sample)]
        why = "the training service scores answers as they are sampled at temperature 1, with no top_p and the like"
        self.left_out_because = f"{why}: {some_rollouts(others)} left out" if others else None
        return plain

    def _fault(self, samples: Sequence[Sample]) -> str | None:
        if not samples:
            return self.left_out_because or "it has no trainable tokens"
        bad = [s.rollout_id for s in samples if not all(map(math.isfinite, (*s.logprobs, *s.advantages)))]
        return f"log-probabilities or advantages not finite in {some_rollouts(bad)}" if bad else None

    def _gradients(self, samples: Sequence[Sample], batch: Batch) -> dict[str, float]:
        """Return the metrics of the forward pass. If the step is to be skipped, the service forgets the gradients."""
        config = self.settings
        rows = rows_of(samples, token_weights(samples, config, batch.compared), config.section(TinkerConfig).reduction)
        self._ready()
        logprobs = self._service.forward_backward(rows, loss_of(config), loss_config(config))
        metrics = numbers_of(rows, logprobs, config)
        fresh = [i for i, sample in enumerate(samples) if sample.versions == (batch.version,)]
        of_fresh = numbers_of([rows[i] for i in fresh], [logprobs[i] for i in fresh], config) if fresh else {"kl": 0.0}
        metrics["sampler_difference"] = nats_apart(of_fresh["kl"])
        if not math.isfinite(metrics["loss"]):
            self.skipped_because = f"the loss is not finite over {some_rollouts([s.rollout_id for s in samples])}"
        elif of_fresh.get("trained_tokens", 0) >= SAMPLER_TOKENS:
            self.skipped_because = wrong_sampler(of_fresh["kl"], self._tolerance)
            self.warnings = {"sampler": self.skipped_because} if self.skipped_because else {}
        if self.skipped_because is not None:
            self._service.forget()  # with the gradients that it has
        return metrics | {"computed_tokens": _tokens(rows)}

    def _take(self, rate: float) -> dict[str, float]:
        limit = self.settings.max_grad_norm
        reported = self._service.optim_step(learning_rate=rate, grad_clip_norm=limit, **ADAM)
        self._updates += 1
        self._state = self._save_state()
        norms = [value for name, value in reported.items() if "grad_norm" in name]
        return {"grad_norm": norms[0]} if norms else {}

    def _ready(self) -> None:
        """Make the model on the service, if there is none that is in the saved state."""
        if not self._service.has_model:
            log.info("asking %s for a model", self._service.where)
            self._service.begin(self._state)

    def _save_state(self) -> str:
        return self._service.save_state(self._name())

    def _name(self) -> str:
        return f"lightning-{self._updates:06}-{secrets.token_hex(4)}"

    # Scoring -------------------------------------------------------------------------------------------------------

    def logprobs(
        self, token_ids: Sequence[Sequence[int]], adapter: str = DEFAULT_ADAPTER, *, served: bool = False
    ) -> list[list[float]]:
        """Return each token's log-probability at temperature 1; 0.0 for the first of each row.

        The service has the present weights only, also for `served`.
        """
        rows = {i: Datum(tuple(ids[:-1]), tuple(ids[1:])) for i, ids in enumerate(token_ids) if len(ids) > 1}
        self._ready()
        found = dict(zip(rows, self._service.logprobs([*rows.values()]) if rows else [], strict=True))
        return [[0.0] * min(len(ids), 1) + found.get(i, []) for i, ids in enumerate(token_ids)]

    def scores_of(self, samples: Sequence[Sample], *, served: bool = False) -> list[list[float]]:
        """Return the log-probabilities of each row's answers, at temperature 1; 0.0 for all other tokens."""
        found = self.logprobs([sample.token_ids for sample in samples])
        return [[v * m for v, m in zip(row, s.mask, strict=True)] for row, s in zip(found, samples, strict=True)]

    def remember_served(self, adapter: str = DEFAULT_ADAPTER) -> None:
        """Do nothing: the service would need a second model to score with earlier weights."""

    # Weights and checkpoints ---------------------------------------------------------------------------------------

    def adapter(self, name: str = DEFAULT_ADAPTER) -> Mapping[str, Tensor]:
        """Return the weights that the service returned last."""
        return self._published

    def save_weights(self, directory: Path, *, merged: bool) -> None:
        """Write the adapter that vLLM loads."""
        if merged:
            raise ConfigError("policy.publish: merged needs tinker.enabled: false; a Tinker service trains adapters")
        self._ready()
        weights, about = read_adapter(self._service.adapter_files(self._name()))
        write_adapter(weights, about, self._model, directory)
        self._published = weights

    def save(self, directory: Path) -> None:
        """Write where the service has its state; `directory` appears atomically."""
        if self._state is None:
            self._ready()
            self._state = self._save_state()
        state = {"step": self._step, "updates": self._updates, "state": self._state}
        with atomic_directory(directory) as temporary:
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=1))
            write_config(temporary, self._saved_config, self.rate.value)

    def load(self, directory: Path) -> int:
        """Resume exactly from what `save` wrote; returns the step it was written after.

        Raises ConfigError, and changes nothing, if the checkpoint is damaged or belongs to another model.
        """
        changed = config_changes(directory, self._saved_config)
        state = _read(directory / STATE_FILE)
        self._service.forget()
        self._state, self._step, self._updates = state["state"], state["step"], state["updates"]
        self.trackers.state.global_step = self._step
        if self._step:  # untrained weights have no rate to keep
            self.rate = self._rate_of(saved_rate(directory))
            self.trackers.args.learning_rate = self.rate.value
        self._ready()
        if changed:
            log.warning("the configuration changed since %s was written: %s", directory, ", ".join(changed))
        return self._step

    def end(self) -> None:
        """Do nothing: no other process waits for this one."""

    def close(self) -> None:
        """Leave the service, and let the trackers finish their files."""
        self._service.forget()
        self.trackers.close()


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
        return {"state": str(state["state"]), "step": int(state["step"]), "updates": int(state["updates"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the checkpoint {path} is damaged ({error}): restore it from a backup, or start anew with another "
            "store.url and policy.directory"
        ) from None


def _tokens(rows: Sequence[Datum]) -> float:
    return float(sum(len(row.tokens) for row in rows))
