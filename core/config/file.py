"""Reads the configuration: a YAML file, overridden by `LIGHTNING_<SECTION>__<KEY>` variables and by options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..errors import ConfigError
from .root import Config
from .wrong import ENV_PREFIX, fields_of, lines, require_known

# What reading YAML may raise: ValueError for the 13th month.
_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
# Set for agent programs by `lightning-proxy run`, and for vLLM by us; not configuration.
ENV_NOT_CONFIG = {
    "LIGHTNING_API_KEY", "LIGHTNING_ROLLOUT_ID", "LIGHTNING_TASK", "LIGHTNING_TASK_FILE", "LIGHTNING_URL",
    "LIGHTNING_OPERATOR_KEY_FILE",
}  # fmt: skip
PLACE = {"LIGHTNING_PROXY__HOST", "LIGHTNING_PROXY__PORT"}


def load_config(path: Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Read `path`, then the environment, then `overrides` (such as {"proxy.port": 1}). The last one wins.

    Raises ConfigError with a line for each wrong key or value that names it, and where it comes from.
    """
    return config_of(read_config(path), overrides, path)


def config_of(data: dict[str, Any], overrides: dict[str, Any] | None = None, path: Path | None = None) -> Config:
    """Check `data`, which was read from `path`, with the environment and `overrides`, as `load_config` does."""
    origins: dict[str, str] = {}  # of keys that are not the file's
    others = []
    for name, value in sorted(os.environ.items()):
        if not name.startswith(ENV_PREFIX) or name in ENV_NOT_CONFIG:
            continue
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if section in fields_of(Config) or "__" in name:
            keys = [section, *key.lstrip("_").split("__")] if key else [section]
            _put(data, keys, _parse(value, name), name)
            origins[".".join(keys)] = name
        else:
            others.append(name)
    require_known(others, Config)
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(data, key.split("."), value, key)
            origins[key] = "command line"
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(lines(error, Config, path, origins)) from None


def inherited() -> dict[str, str]:
    """Return our variables for a program of the user's: without keys of ours, and configuration, which may hold some.

    Where the proxy listens is there: a program may run our commands.
    """
    return {name: value for name, value in os.environ.items() if name in PLACE or not _is_ours(name)}


def _is_ours(name: str) -> bool:
    if not name.startswith(ENV_PREFIX):
        return False
    section = name.removeprefix(ENV_PREFIX).lower().partition("_")[0]
    return section in fields_of(Config) or "__" in name or "KEY" in name or name in ENV_NOT_CONFIG


def read_config(path: Path | None) -> dict[str, Any]:
    """Return the sections of a configuration file; none without a path. Raise ConfigError."""
    if path is not None and not path.exists():
        raise ConfigError(f"cannot read {path}: there is no such file; `lightning-proxy init {path}` writes one")
    return {} if path is None else read_yaml(path)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's sections. Raise ConfigError."""
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
    """Return the problem and its place, without quoting the text: it may hold a key."""
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
