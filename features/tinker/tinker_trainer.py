"""Takes training steps on a service with the Tinker API, through its Python client."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import secrets
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import AutoConfig

from ...core.config.address import shown
from ...core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError, PublishError, TrainingUnavailable
from ...trainer.checkpoint import atomic_directory, config_changes, saved_config, saved_rate, write_config
from ...trainer.rate import rate_after, rate_of
from ...trainer.report.trackers import Trackers
from ...trainer.step.losses import LossInputs, policy_loss, token_weights
from ...trainer.step.scoring import longest_sample
from ...trainer.step.step_metrics import SAMPLER_TOKENS, k3, nats_apart, some_rollouts, wrong_sampler
from ...trainer.types import Batch, Sample
from ...trainer.weights import MARKER, tolerance
from .config import LOSSES, TinkerConfig

log = logging.getLogger(__name__)
STATE_FILE = "tinker.json"
# AdamW's defaults, which the local trainer takes.
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
REQUEST_S = 900.0  # with its wait in the service's queue
CLOSE_S = 10.0
FAULTS = 3  # failures in a row that end the training
LATER = (408, 429)  # statuses that ask for another try
NO_KEY = "tml-none"  # the client wants a key of this form, also for a server that asks for none
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
REFUSALS = (
    "AuthenticationError", "PermissionDeniedError", "BillingError", "BadRequestError", "UnprocessableEntityError"
)  # fmt: skip
Weights = dict[str, Tensor]
Scores = list[list[float]]  # of each row, the log-probability of each target


@dataclass(frozen=True, slots=True)
class Datum:
    """A row for the service. `targets[i]` is the token after `tokens[i]`. `advantages` include the loss weights."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()


class TinkerService:
    """One model on a service. After an error it is abandoned, and `ready` makes another from a saved state."""

    def __init__(self, config: TinkerConfig, base_model: str, rank: int, seed: int) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs full addresses, with the credentials in them
        os.environ.setdefault("TINKER_TELEMETRY", "0")  # the client reports errors to the service otherwise
        import tinker

        self._tinker: Any = tinker
        self._base_model, self._rank, self._seed = base_model, rank, seed
        self._session: Any = None
        self._model: Any = None
        self._faults = 0
        key = None if config.api_key is None else config.api_key.get_secret_value()
        finds_its_own = config.base_url is None or os.environ.keys() & {"TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"}
        self._access = {"base_url": config.base_url, "api_key": key or (None if finds_its_own else NO_KEY)}
        self._where = shown(config.base_url or "the Tinker service")

    def ready(self, state: str | None) -> None:
        """Make a model if there is none: from a saved state and its optimizer, or a new one if `state` is None."""
        if self._model is not None:
            return
        log.info("requesting a model from %s", self._where)
        with self._calls(f"cannot resume from {state}" if state else f"cannot create a model of {self._base_model}"):
            self._session = self._tinker.ServiceClient(**self._access)
            if state is None:
                made = self._session.create_lora_training_client(
                    self._base_model, rank=self._rank, seed=self._seed, train_unembed=False
                )
            else:
                made = self._session.create_training_client_from_state_with_optimizer(state)
            self._model = _result(made) if hasattr(made, "result") else made

    def forget(self) -> None:
        """Abandon the model, with everything that was not saved."""
        session, self._session, self._model = self._session, None, None
        if hasattr(session, "close"):
            with suppress(Exception):  # its model is given up, whatever the service answers
                session.close("interrupted").result(timeout=CLOSE_S)

    def logprobs(self, rows: Sequence[Datum]) -> Scores:
        """Return the log-probability of each target."""
        with self._calls("cannot score rows"):
            data = [self._datum(row, weights=[1.0] * len(row.tokens)) for row in rows]
            return _scores(self._model.forward(data, "cross_entropy"), rows)

    def forward_backward(self, rows: Sequence[Datum], loss: str, config: Mapping[str, float]) -> Scores:
        """Add the rows' gradients to the model's. Return the log-probability of each target."""
        with self._calls(f"cannot take a step with the loss {loss}"):
            data = [self._datum(row, logprobs=row.logprobs, advantages=row.advantages) for row in rows]
            return _scores(self._model.forward_backward(data, loss, config), rows)

    def optim_step(self, **adam: float) -> dict[str, float]:
        with self._calls("cannot apply the gradients"):
            answer = _result(self._model.optim_step(self._tinker.AdamParams(**adam)))
            return dict(getattr(answer, "metrics", None) or {})

    def save_state(self, name: str) -> str:
        """Save weights and optimizer on the service. Return their path."""
        with self._calls("cannot save its state"):
            path = str(_result(self._model.save_state(name)).path)
        self._faults = 0
        return path

    def adapter_files(self, name: str) -> dict[str, bytes]:
        """Save the adapter as files, and return them by name."""
        with self._calls("does not return the adapter"):
            if hasattr(self._model, "save_weights_external"):
                path = _result(self._model.save_weights_external(name)).path
                urls = _result(self._tinker.RestClient(**self._access).get_external_weights_urls(path)).urls
                return {name.rsplit("/", 1)[-1]: _download(url) for name, url in urls.items()}
            path = _result(self._model.save_weights_for_sampler(name)).path
            model, _, checkpoint = path.removeprefix("tinker://").partition("/")
            found = _result(self._session.create_rest_client().get_checkpoint_archive_url(model, checkpoint))
            with tarfile.open(fileobj=io.BytesIO(_download(found.url))) as archive:  # nothing is extracted to the disk
                files = {PurePosixPath(member.name).name: archive.extractfile(member) for member in archive}
                return {name: file.read() for name, file in files.items() if file is not None}

    def _datum(self, row: Datum, **inputs: Sequence[float]) -> Any:
        of = self._tinker.TensorData
        floats = {name: of(data=list(values), dtype="float32", shape=[len(values)]) for name, values in inputs.items()}
        targets = of(data=list(row.targets), dtype="int64", shape=[len(row.targets)])
        tokens = self._tinker.ModelInput.from_ints(list(row.tokens))
        return self._tinker.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, **floats})

    @contextmanager
    def _calls(self, what: str) -> Iterator[None]:
        """Abandon the model on an error. Raises ConfigError if a user must act, or for the third fault in a row.

        Otherwise raises TrainingUnavailable. Outages do not count as faults.
        """
        import httpx

        t = self._tinker
        try:
            yield
        except Exception as error:  # the client raises its own errors, and plain ValueError and RuntimeError
            self.forget()
            said = " ".join((str(error) or type(error).__name__).split())[:500]
            problem = f"{self._where} {what}: {said}"
            refusals = tuple(getattr(t, name) for name in REFUSALS if hasattr(t, name))
            is_users = isinstance(error, t.RequestFailedError) and str(error.category).lower().endswith("user")
            if is_users or isinstance(error, refusals) or type(error) is t.TinkerError:
                raise ConfigError(f"tinker: {problem}") from error
            away = (t.APIConnectionError, t.InternalServerError, t.RateLimitError, TimeoutError, httpx.HTTPError)
            status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 500
            if not isinstance(error, away) or (status < 500 and status not in LATER):
                self._faults += 1
                if self._faults >= FAULTS:
                    raise ConfigError(f"tinker: {problem} ({self._faults} times)") from error
            raise TrainingUnavailable(f"{problem}; training continues from the last saved state") from error


def _result(future: Any) -> Any:
    return future.result(timeout=REQUEST_S)


def _scores(future: Any, rows: Sequence[Datum]) -> Scores:
    found = [list(output["logprobs"].data) for output in _result(future).loss_fn_outputs]
    if [len(values) for values in found] != [len(row.tokens) for row in rows]:
        raise ValueError("it returned a wrong number of log-probabilities for a row")
    return found


def _download(url: str) -> bytes:
    import httpx

    answer = httpx.get(url, timeout=REQUEST_S, follow_redirects=True)
    if answer.is_success:
        return answer.content
    # Whoever has the address may download, so no message names more than its host.
    message = f"{answer.url.host} answered with HTTP {answer.status_code}"
    raise httpx.HTTPStatusError(message, request=answer.request, response=answer)


def write_adapter(files: Mapping[str, bytes], model: str, directory: Path) -> Weights:
    """Write an adapter of `model`, and return its weights. Raises PublishError if it is incomplete or not PEFT's."""
    if missing := [name for name in (WEIGHTS_FILE, CONFIG_FILE) if name not in files]:
        returned = ", ".join(files) or "nothing"
        raise PublishError(f"the training service did not return {' and '.join(missing)}; it returned {returned}")
    weights, theirs = load(files[WEIGHTS_FILE]), json.loads(files[CONFIG_FILE])
    names = {name: _NAME.fullmatch(name) for name in weights}
    unknown = sorted(name for name, match in names.items() if match is None)
    if unknown or not weights:
        raise PublishError(
            f"the training service's weights are not a LoRA adapter in PEFT's format; names: {unknown[:3] or 'none'}"
        )
    targets = sorted({match[1].rsplit(".", 1)[-1] for match in names.values() if match})
    config = LoraConfig(
        task_type="CAUSAL_LM", r=int(theirs["r"]), lora_alpha=int(theirs["lora_alpha"]), target_modules=targets,
        base_model_name_or_path=model, inference_mode=True,
    )  # fmt: skip
    with atomic_directory(directory) as temporary:
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        config.save_pretrained(str(temporary))
        (temporary / MARKER).touch()
    return weights


class TinkerTrainer:
    """A `TrainingEngine` on a service. It resumes only from saved states, so no step counts twice."""

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
        """Have the service compute gradients. Rows not sampled at plain temperature 1 are left out."""
        begun = time.perf_counter()
        trained = [sample for sample in batch.samples if sample.trained_tokens]
        samples = [sample for sample in trained if is_plain(sample)]
        others = [sample.rollout_id for sample in trained if not is_plain(sample)]
        why = "the training service only scores answers that were sampled at temperature 1, without top_p and the like"
        self.left_out_because = f"no training on rows of {some_rollouts(others)}: {why}" if others else None
        bad = [s.rollout_id for s in samples if not all(map(math.isfinite, (*s.logprobs, *s.advantages)))]
        self.warnings, self.skipped_because = {}, None
        metrics: dict[str, float] = {"trained_tokens": 0.0, "computed_tokens": 0.0}
        if not samples:
            self.skipped_because = self.left_out_because or "no trainable tokens"
        elif bad:
            self.skipped_because = f"log-probabilities or advantages are not finite in {some_rollouts(bad)}"
        else:
            metrics |= self._gradients(samples, batch)
        metrics["forward_backward_s"] = time.perf_counter() - begun
        self._computed = batch, metrics

    def _gradients(self, samples: Sequence[Sample], batch: Batch) -> dict[str, float]:
        """Have the service compute gradients, and return metrics. If the step is to be skipped, abandon the model."""
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
            self.skipped_because = f"the loss is not finite for {some_rollouts([s.rollout_id for s in samples])}"
        elif of_fresh["trained_tokens"] >= SAMPLER_TOKENS:
            self.skipped_because = wrong_sampler(of_fresh["kl"], self._tolerance)
            self.warnings = {"sampler": self.skipped_because} if self.skipped_because else {}
        if self.skipped_because is not None:
            self._service.forget()  # with the gradients that it has
        return metrics | {"computed_tokens": float(sum(len(row.tokens) for row in rows))}

    def optim_step(self) -> dict[str, float]:
        """Take the step and save the state. Return the finite metrics; `skipped` is 1 if the step was not taken."""
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
        """Return each token's log-probability at temperature 1, under the current weights. Each row begins with 0.0."""
        rows = {i: Datum(tuple(ids[:-1]), tuple(ids[1:])) for i, ids in enumerate(token_ids) if len(ids) > 1}
        self._service.ready(self._state)
        found = dict(zip(rows, self._service.logprobs([*rows.values()]) if rows else [], strict=True))
        return [[0.0] * min(len(ids), 1) + found.get(i, []) for i, ids in enumerate(token_ids)]

    def scores_of(self, samples: Sequence[Sample], *, served: bool = False) -> list[list[float]]:
        found = self.logprobs([sample.token_ids for sample in samples])
        return [[v * m for v, m in zip(row, s.mask, strict=True)] for row, s in zip(found, samples, strict=True)]

    def remember_served(self, adapter: str = DEFAULT_ADAPTER) -> None:
        """Do nothing: the service would need a second model to score with earlier weights."""

    def adapter(self, name: str = DEFAULT_ADAPTER) -> Mapping[str, Tensor]:
        return self._published

    def save_weights(self, directory: Path, *, merged: bool) -> None:
        if merged:
            raise ConfigError("policy.publish merged needs tinker.enabled false: a Tinker service trains adapters")
        self._service.ready(self._state)
        self._published = write_adapter(self._service.adapter_files(self._name()), self._model, directory)

    def save(self, directory: Path) -> None:
        """Write the path of the state on the service. `directory` appears atomically."""
        if self._state is None:
            self._service.ready(None)
            self._state = self._service.save_state(self._name())
        state = {"step": self._step, "updates": self._updates, "state": self._state}
        with atomic_directory(directory) as temporary:
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=1))
            write_config(temporary, self._saved_config, self.rate.value)

    def load(self, directory: Path) -> int:
        """Resume from what `save` wrote, and return its step.

        Raises ConfigError, and changes nothing, if the checkpoint is damaged or does not fit the configuration.
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
        self._service.forget()
        self.trackers.close()


def is_plain(sample: Sample) -> bool:
    """Return whether all answers of the sample were sampled at plain temperature 1."""
    return not sample.shaped and all(value == 1.0 for value in compress(sample.temperatures, sample.mask))


def rows_of(samples: Sequence[Sample], weights: Mapping[str, float], reduction: str) -> list[Datum]:
    """Return the rows of a step. `weights`: the weight of every token of a rollout, by rollout id.

    Every loss of the service is linear in the advantage, so the advantages are multiplied by the weights. If the
    service averages over a row's tokens and then over rows (`mean`), the advantages compensate for that, too.
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
    """Return the smallest and largest importance ratio that are not clipped."""
    if LOSSES[config.loss_type] == "cispo":
        return 0.0, min(config.cap, 1e6)  # JSON has no infinity
    return 1 - config.clip_low, 1 + config.clip_high


def numbers_of(
    samples: Sequence[Sample], logprobs: Scores, weights: Mapping[str, float], config: TrainerConfig
) -> dict[str, float]:
    """Return a step's loss, ratios and KL, named as in `metric_schema`. `logprobs`: the policy's, for each target."""

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
