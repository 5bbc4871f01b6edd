"""Reads the configuration: a YAML file, overridden by `LIGHTNING_<SECTION>__<KEY>` variables and by options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..errors import ConfigError
from .root import Config

# What reading YAML may raise: ValueError for the 13th month.
_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
ENV_PREFIX = "LIGHTNING_"
# Set for agent programs by `lightning-proxy run`; not configuration.
ENV_NOT_CONFIG = {"LIGHTNING_API_KEY", "LIGHTNING_ROLLOUT_ID", "LIGHTNING_TASK", "LIGHTNING_URL"}


def load_config(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Read `path`, then the environment, then `overrides` (such as {"proxy.port": 1}). The last one wins.

    Raises ConfigError with one line that names the wrong key or value, and where it comes from.
    """
    data = _read_yaml(path) if path is not None else {}
    origins: dict[str, str] = {}  # of keys that are not the file's
    for name, value in sorted(os.environ.items()):
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if (
            name.startswith(ENV_PREFIX)
            and name not in ENV_NOT_CONFIG
            and (section in Config.model_fields or "__" in name)
        ):
            keys = [section, *key.lstrip("_").split("__")] if key else [section]
            _put(data, keys, _parse(value, name), name)
            origins[".".join(keys)] = name
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(data, key.split("."), value, key)
            origins[key] = "command line"
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_line(error, path, origins)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = _load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    except _NO_YAML as error:
        raise ConfigError(f"{path} is not valid YAML: {_problem(error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections such as 'proxy:', got {type(data).__name__}")
    # A section without keys is None to YAML; it has all its defaults.
    return {name: {} if section is None else section for name, section in data.items()}


def _parse(value: str, name: str) -> Any:
    try:
        return _load(value)
    except _NO_YAML as error:
        raise ConfigError(f"{name} is not valid YAML: {_problem(error)}") from None


def _load(text: str) -> Any:
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice. YAML would silently ignore the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        for i, name in enumerate(names):
            if any(name.value == earlier.value for earlier in names[:i]):
                raise yaml.constructor.ConstructorError(None, None, f"{name.value!r} occurs twice", name.start_mark)
        return super().construct_mapping(node, deep)


def _problem(error: Exception) -> str:
    """Say what is wrong and where, without quoting the text: it may hold a key."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, ValueError):
        return "what looks like a date or a number is none"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return type(error).__name__
    return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"


def _put(data: dict[str, Any], keys: list[str], value: Any, origin: str) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{origin}: {key} is not a section")
    data[keys[-1]] = value


def _one_line(error: ValidationError, path: Path | None, origins: Mapping[str, str]) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    origin = next((name for key, name in origins.items() if f"{where}.".startswith(f"{key}.")), None)
    return ": ".join(filter(None, (origin or str(path or "configuration"), where, message)))
