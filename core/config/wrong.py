"""Explains a wrong configuration: a line for each wrong key or value, with the key that was probably meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .feature import feature_sections

ENV_PREFIX = "LIGHTNING_"
ALIKE = 0.75  # of 1: how alike a key and a wrong one are at least
_MOST_GUESSES = 3


def lines(error: ValidationError, model: type[BaseModel], path: Path | None, origins: Mapping[str, str]) -> str:
    """Return a line for each wrong key or value: its source, its name, the problem."""
    found = dict.fromkeys(_line(one, model, path, origins) for one in error.errors(include_input=False))
    return "\n".join(found)


def require_known(names: Collection[str], model: type[BaseModel]) -> None:
    """Raise ConfigError for variables that look like a key of ours and are none, such as LIGHTNING_PORT.

    Others that begin alike are not ours: there are more programs with that word in their name.
    """
    wrong = [f"{name}: no such key{meant}" for name in names if (meant := _did_you_mean(_meant_by(name, model)))]
    if wrong:
        raise ConfigError("\n".join(wrong))


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the type of each key of a section, or of the whole configuration: with the sections of features."""
    own = {name: field.annotation for name, field in model.model_fields.items()}
    return own | feature_sections() if model.model_config.get("extra") == "allow" else own


def _line(error: Any, model: type[BaseModel], path: Path | None, origins: Mapping[str, str]) -> str:
    loc = error["loc"]
    where = ".".join(str(part) for part in loc)
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        now = _moved(where)
        message = f"it is {now} now" if now else f"unknown key{_did_you_mean(_alike(loc, model))}"
    origin = next((name for key, name in origins.items() if f"{where}.".startswith(f"{key}.")), None)
    return ": ".join(filter(None, (origin or str(path or "configuration"), where, message)))


def _moved(key: str) -> str | None:
    """Where a key is now that was the core's once, and is a feature's."""
    return next((kind.moved[key] for kind in feature_sections().values() if key in kind.moved), None)


def _did_you_mean(guesses: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(guesses)}?" if guesses else ""


def _alike(loc: Sequence[object], model: type[BaseModel]) -> list[str]:
    """The keys beside this one that read alike; else the full names of those elsewhere."""
    *above, name = (str(part) for part in loc)
    here: type[BaseModel] | None = model
    for part in above:
        here = here if here is None or part.isdigit() else _section(here, part)
    near = get_close_matches(name, fields_of(here), _MOST_GUESSES, ALIKE) if here else []
    return near or [key for key in _keys(model) if key.rpartition(".")[2] == name][:_MOST_GUESSES]


def _meant_by(variable: str, model: type[BaseModel]) -> list[str]:
    """The variables of keys that read like this one, or whose last part is its name."""
    name = variable.removeprefix(ENV_PREFIX).lower()
    keys = {key.replace(".", "_"): key for key in _keys(model)}
    near = get_close_matches(name, keys, 1, 0.85) or [
        long for long, key in keys.items() if key.rpartition(".")[2] == name and "." in key
    ]
    return [ENV_PREFIX + keys[one].upper().replace(".", "__") for one in near[:_MOST_GUESSES]]


def _keys(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key, with its sections, as in proxy.port. What a list holds has no names of its own."""
    for name, inner in fields_of(model).items():
        yield before + name
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _keys(inner, f"{before}{name}.")


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    kind = fields_of(model).get(name)
    return next((one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)), None)
