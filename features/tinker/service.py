"""Talks to a service with the Tinker API, through its official client: JSON up to 0.24, protobuf from 0.25.

A session has one model. The API numbers a model's requests, so one that its client sends again counts once.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from peft import LoraConfig
from safetensors.torch import load, save_file
from torch import Tensor

from ...core.config.address import shown
from ...core.errors import ConfigError, PublishError, TrainingUnavailable
from ...trainer.checkpoint import atomic_directory
from ...trainer.weights import MARKER
from .config import TinkerConfig

log = logging.getLogger(__name__)
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
    """One row. Lists are as long as `tokens`; `targets[i]` is the token after `tokens[i]`.

    `advantages` carry the token's weight in the step's loss.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()


class TinkerService:
    """One model on a service. After an error it has none: `ready` makes another from a saved state."""

    def __init__(self, config: TinkerConfig, base_model: str, rank: int, seed: int) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs full addresses, with what lets one in
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
        """Make the model, if there is none, that a saved state has, with its optimizer; or a new one."""
        if self._model is not None:
            return
        log.info("asking %s for a model", self._where)
        with self._calls(f"cannot resume from {state}" if state else f"does not train {self._base_model}"):
            self._session = self._tinker.ServiceClient(**self._access)
            if state is None:
                made = self._session.create_lora_training_client(
                    self._base_model, rank=self._rank, seed=self._seed, train_unembed=False
                )
            else:
                made = self._session.create_training_client_from_state_with_optimizer(state)
            self._model = _result(made) if hasattr(made, "result") else made

    def forget(self) -> None:
        """Give the model up. The service keeps it, with all that was sent to it and not saved."""
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
        """Add the rows' gradients. Return the log-probability of each target, before the step."""
        with self._calls(f"cannot take a step with the loss {loss}"):
            data = [self._datum(row, logprobs=row.logprobs, advantages=row.advantages) for row in rows]
            return _scores(self._model.forward_backward(data, loss, config), rows)

    def optim_step(self, **adam: float) -> dict[str, float]:
        """Apply the gradients, and return the service's metrics."""
        with self._calls("cannot apply the gradients"):
            answer = _result(self._model.optim_step(self._tinker.AdamParams(**adam)))
            return dict(getattr(answer, "metrics", None) or {})

    def save_state(self, name: str) -> str:
        """Save weights and optimizer on the service; returns the path."""
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
            return files_of_archive(_download(found.url))

    def _datum(self, row: Datum, **inputs: Sequence[float]) -> Any:
        of = self._tinker.TensorData
        floats = {name: of(data=list(values), dtype="float32", shape=[len(values)]) for name, values in inputs.items()}
        targets = of(data=list(row.targets), dtype="int64", shape=[len(row.targets)])
        tokens = self._tinker.ModelInput.from_ints(list(row.tokens))
        return self._tinker.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, **floats})

    @contextmanager
    def _calls(self, what: str) -> Iterator[None]:
        """Turn the client's errors into ConfigError, if only the user can help, or else into TrainingUnavailable.

        After any of them the model's state is unknown, so the model is given up.
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
            raise TrainingUnavailable(f"{problem}; the step is taken again from the last saved state") from error


def _result(future: Any) -> Any:
    return future.result(timeout=REQUEST_S)


def _scores(future: Any, rows: Sequence[Datum]) -> Scores:
    found = [list(output["logprobs"].data) for output in _result(future).loss_fn_outputs]
    if [len(values) for values in found] != [len(row.tokens) for row in rows]:
        raise ValueError("it returned log-probabilities of other lengths than the rows")
    return found


def _download(url: str) -> bytes:
    import httpx

    answer = httpx.get(url, timeout=REQUEST_S, follow_redirects=True)
    if answer.is_success:
        return answer.content
    # The address lets everybody in who has it, so no message names more than its host.
    message = f"{answer.url.host} answered {answer.status_code}"
    raise httpx.HTTPStatusError(message, request=answer.request, response=answer)


def files_of_archive(content: bytes) -> dict[str, bytes]:
    """Return the files in a tar archive, by their last name. Nothing is extracted to the disk."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {PurePosixPath(member.name).name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file is not None}


def write_adapter(files: Mapping[str, bytes], model: str, directory: Path) -> Weights:
    """Write the adapter of `model`, and return its weights. `directory` appears atomically, with a marker file.

    PublishError if the files are no LoRA adapter under PEFT's names.
    """
    if missing := [name for name in (WEIGHTS_FILE, CONFIG_FILE) if name not in files]:
        returned = ", ".join(files) or "nothing"
        raise PublishError(f"the training service returned no {' and no '.join(missing)}: {returned}")
    weights, theirs = load(files[WEIGHTS_FILE]), json.loads(files[CONFIG_FILE])
    names = {name: _NAME.fullmatch(name) for name in weights}
    unknown = sorted(name for name, match in names.items() if match is None)
    if unknown or not weights:
        raise PublishError(
            f"the training service returned weights that are no LoRA adapter in PEFT's format: {unknown[:3]}"
        )
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=int(theirs["r"]),
        lora_alpha=int(theirs["lora_alpha"]),
        target_modules=sorted({match[1].rsplit(".", 1)[-1] for match in names.values() if match}),
        base_model_name_or_path=model,
        inference_mode=True,
    )
    with atomic_directory(directory) as temporary:
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        config.save_pretrained(str(temporary))
        (temporary / MARKER).touch()
    return weights
