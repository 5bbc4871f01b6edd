"""The file of an experiment, and the lessons that it asks for: each variant with each seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ...commands.run.runner import runner_for
from ...commands.run.tasks import read_tasks
from ...commands.trial import Json, Work, merged
from ...commands.vllm import require_model
from ...core.config.file import config_of, lines, read_config, read_yaml, variables
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ...trainer.functions import check_functions, own_functions
from ...trainer.plugins import Run, check

# Each lesson has its own.
OWN = ("proxy.host", "proxy.port", "vllm.port", "store.url", "policy.directory", "trainer.seed")


Variant = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Experiment(Work):
    """An experiment's file."""

    config: Path | None = None
    rollouts: Annotated[int, Field(ge=1)] | None = None
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    variants: Annotated[dict[Name, Variant], Field(min_length=1)]

    @model_validator(mode="after")
    def _makes_sense(self) -> Experiment:
        if (self.rollouts is None) == (self.minutes is None):
            raise ValueError("rollouts or minutes, one of the two, says how long each run trains")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: each once")
        return self


@dataclass(frozen=True, slots=True)
class LessonPlan:
    """One variant with one seed. `settings` are its configuration file; `made_with` is all that its result rests on."""

    variant: str
    seed: int
    directory: Path
    settings: Json
    config: Config
    made_with: Json

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def result(self) -> Path:
        return self.directory / "result.json"


def read_experiment(file: Path, config: Path | None) -> Experiment:
    """Read the file; `config` is the configuration if it names none. ConfigError with a line for each wrong key."""
    try:
        found = Experiment.model_validate({"config": config} | read_yaml(file))
    except ValidationError as error:
        raise ConfigError(lines(error, Experiment, file, {})) from None
    read_tasks(found.tasks), read_tasks(found.held_out)
    return found


def lessons_of(experiment: Experiment, directory: Path) -> list[LessonPlan]:
    """Return all lessons, every variant with the first seed first. ConfigError names the variant and the wrong key."""
    base = read_config(experiment.config)
    config_of(deepcopy(base), path=experiment.config)
    shared = experiment.model_dump(mode="json", exclude={"config", "seeds", "variants"}, exclude_none=True)
    made: dict[str, tuple[Json, Config, Json]] = {}
    for name, changes in experiment.variants.items():
        settings, config = _variant(name, base, changes, experiment.rollouts)
        kept = flat(config.model_dump(mode="json", exclude_defaults=True))
        own = {key: value for key, value in kept.items() if key not in OWN}
        made[name] = settings, config, {"config": own, "files": _files(experiment, config)}
    return [
        LessonPlan(name, seed, directory.absolute() / name / f"seed-{seed}", settings, config, shared | made_with)
        for seed in experiment.seeds
        for name, (settings, config, made_with) in made.items()
    ]


def _variant(name: str, base: Json, changes: Json, rollouts: int | None) -> tuple[Json, Config]:
    """A variant's settings, checked as the commands of its lessons would."""
    label = f"variant {name}"
    settings = merged(base, changes)
    config = config_of(deepcopy(settings), path=Path(label))
    try:
        keys = {*flat(changes), *OWN}
        for variable, key in variables():
            if hidden := next((one for one in sorted(keys) if f"{one}.".startswith(f"{key}.")), None):
                raise ConfigError(f"the variable {variable} would hide {hidden}: unset it")
        if own := next((one for one in OWN if one in flat(changes)), None):
            raise ConfigError(f"{own}: each run has its own")
        require_model(config)
        check(config, Run())
        check_functions(config.trainer)
        if not {"trainer.loss", "trainer.context_loss"}.isdisjoint(dict(own_functions(config.trainer))):
            from ...trainer.step.losses import check_gradients  # imports torch

            check_gradients(config.trainer)
        upstream = config.policy_upstream
        urls = upstream.urls if upstream is not None and not upstream.servers else ()
        if len(urls) != 1 or urlsplit(urls[0]).port != config.vllm.port:
            raise ConfigError("upstreams: each run starts one vLLM: leave out replicas, and name the port of vllm.port")
        if config.run.proxy_url is not None:
            raise ConfigError("run.proxy_url: each run has a proxy of its own")
        if rollouts is not None and rollouts % config.trainer.group_size:
            raise ConfigError(f"trainer.group_size: {rollouts} rollouts are no groups of {config.trainer.group_size}")
    except LightningError as error:
        raise ConfigError(f"{label}: {error.message}") from None
    return settings, config


def check_agent(experiment: Experiment, config: Config) -> None:
    """Raise ConfigError if `run` would not start the agent."""
    try:
        runner_for(config, experiment.agent, experiment.preload.split(",") if experiment.preload else [], print)
    except ConfigError as error:
        raise ConfigError(f"agent: {error.message}") from None


def _files(experiment: Experiment, config: Config) -> dict[str, str]:
    """The hashes of the task files, the files in the agent's command line, and the files of the user's functions."""
    own = [name for _, name in own_functions(config.trainer)] + [config.rewards.function or ""]
    words = [*experiment.agent, *(name.rpartition(":")[0] for name in own)]
    files = [experiment.tasks, experiment.held_out, *map(Path, words)]
    found = {str(path): path.expanduser() for path in files}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in found.items() if path.is_file()}


def flat(data: Mapping[str, Any], before: str = "") -> Json:
    """Return every value by its dotted key."""
    found: Json = {}
    for key, value in data.items():
        name = f"{before}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found
