"""Reads the configuration: a YAML file, overridden by `LIGHTNING_<SECTION>__<KEY>` variables and by options.

Each wrong key or value is reported in one line. For an unknown key, this line suggests similar ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .root import Config
from .section import feature_sections

_PREFIX = "LIGHTNING_"
# Set for agent programs by `lightning-proxy run`, and for vLLM by us.
_NOT_CONFIG = {
    "LIGHTNING_API_KEY", "LIGHTNING_ROLLOUT_ID", "LIGHTNING_TASK", "LIGHTNING_TASK_FILE", "LIGHTNING_URL",
    "LIGHTNING_OPERATOR_KEY_FILE",
}  # fmt: skip
_PLACE = {"LIGHTNING_PROXY__HOST", "LIGHTNING_PROXY__PORT"}
_MOST_GUESSES = 3


def load_config(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Read `path`, the environment and `overrides` (such as {"proxy.port": 1}). Later ones override earlier ones.

    Raises ConfigError with a line for each wrong key or value: its source, its name, the problem.
    """
    return config_of(read_config(path), overrides, path)


def config_of(data: dict[str, Any], overrides: dict[str, Any] | None = None, path: Path | None = None) -> Config:
    """Return the configuration of `data` (read from `path`), the environment and `overrides`, as `load_config` does."""
    given = [(name, key, _parsed(os.environ[name], name)) for name, key in variables()]
    given += [("command line", key, value) for key, value in (overrides or {}).items() if value is not None]
    for origin, key, value in given:
        *sections, last = key.split(".")
        section = data
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{origin}: {key} cannot be set, because {name} is not a section")
        section[last] = value
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(lines(error, Config, path, {key: origin for origin, key, _ in given})) from None


def variables() -> list[tuple[str, str]]:
    """Return each environment variable that sets a key, with that key. Raises ConfigError if one seems misspelt."""
    found, wrong = [], []
    for name in sorted(os.environ):
        if (key := _key_of(name)) is not None:
            found.append((name, key))
        elif name.startswith(_PREFIX) and name not in _NOT_CONFIG and (meant := _meant_by(name)):
            wrong.append(f"{name}: no such key{_did_you_mean(meant)}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found


def inherited() -> dict[str, str]:
    """Return our environment without our own settings, keys and rollout names, for a user's program.

    The variables of `proxy.host` and `proxy.port` stay: the program may run our commands.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PLACE or not name.startswith(_PREFIX) or not (name in _NOT_CONFIG or "KEY" in name or _key_of(name))
    }


def read_config(path: Path | None) -> dict[str, Any]:
    """Return the sections of a configuration file ({} without a path). Raises ConfigError if it cannot be read."""
    if path is not None and not path.exists():
        raise ConfigError(f"cannot read {path}: there is no such file; `lightning-proxy init {path}` writes one")
    return {} if path is None else read_yaml(path)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file. Raises ConfigError if it cannot be read or holds anything else."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    data = _parsed(text, str(path))
    if not isinstance(data, dict | None):
        raise ConfigError(f"{path}: expected keys and values, got {type(data).__name__}")
    # A section without keys is None to YAML; it has all its defaults.
    return {name: {} if section is None else section for name, section in (data or {}).items()}


def lines(error: ValidationError, model: type[BaseModel], path: Path | None, origins: Mapping[str, str]) -> str:
    """Return a line for each wrong key or value: its source, its name, the problem."""
    found: dict[str, None] = {}
    for one in error.errors(include_input=False):
        where = ".".join(map(str, one["loc"]))
        message = one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            now = next((kind.moved[where] for kind in feature_sections().values() if where in kind.moved), None)
            message = f"renamed to {now}" if now else f"unknown key{_did_you_mean(_alike(where, model))}"
        origin = next((name for key, name in origins.items() if f"{where}.".startswith(f"{key}.")), path)
        found[": ".join(filter(None, (str(origin or "configuration"), where, message)))] = None
    return "\n".join(found)


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the type of each key of a section, or of the whole configuration including features."""
    own = {name: field.annotation for name, field in model.model_fields.items()}
    return own | feature_sections() if model.model_config.get("extra") == "allow" else own


def _key_of(variable: str) -> str | None:
    """The key that a variable sets; None if it sets none."""
    section, _, key = variable.removeprefix(_PREFIX).lower().partition("_")
    if not variable.startswith(_PREFIX) or variable in _NOT_CONFIG:
        return None
    if section not in fields_of(Config) and "__" not in variable:
        return None
    return f"{section}.{key.lstrip('_').replace('__', '.')}".rstrip(".")


def _did_you_mean(guesses: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(guesses)}?" if guesses else ""


def _alike(wrong: str, model: type[BaseModel]) -> list[str]:
    """Keys in the same section that resemble a wrong key, or else the full names of keys elsewhere with its name."""
    above, _, name = re.sub(r"\.\d+", "[]", wrong).rpartition(".")
    keys = [key.rpartition(".") for key in _keys(model)]
    near = get_close_matches(name, [last for before, _, last in keys if before == above], _MOST_GUESSES, 0.75)
    return near or ["".join(key) for key in keys if key[2] == name][:_MOST_GUESSES]


def _meant_by(variable: str) -> list[str]:
    """The variable that a wrong one resembles, or else the variables of keys with its name."""
    name = variable.removeprefix(_PREFIX).lower()
    keys = {key.replace(".", "_"): key for key in _keys(Config) if "[]" not in key}
    near = get_close_matches(name, keys, 1, 0.85) or [one for one in keys if keys[one].endswith(f".{name}")]
    return [_PREFIX + keys[one].upper().replace(".", "__") for one in near[:_MOST_GUESSES]]


def _keys(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """The full names of all sections and keys, such as proxy.port, or upstreams[].name in a list."""
    for name, kind in fields_of(model).items():
        yield before + name
        for inner, mark in ((kind, ""), *((item, "[]") for item in get_args(kind))):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys(inner, f"{before}{name}{mark}.")


def _parsed(text: str, source: str) -> Any:
    """Parse YAML. Raises ConfigError with the problem and, if known, its place, but not values: they may be secret."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError:  # the 13th month
        problem = "a value that looks like a date or a number is invalid"
    except yaml.YAMLError as error:
        problem = type(error).__name__
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
            problem = re.sub(r"(alias|anchor|tag) '[^']*'", r"\1", error.problem or "")
            problem += f", line {mark.line + 1}, column {mark.column + 1}"
    raise ConfigError(f"{source} is not valid YAML: {problem}")


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice. PyYAML would silently ignore the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{name.value!r} occurs twice", name.start_mark)
                seen.add(name.value)
        return super().construct_mapping(node, deep)
