"""Adds the fields of features to models of the core."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from inspect import cleandoc
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, create_model

from .on_board import modules

Model = TypeVar("Model", bound=BaseModel)


def extended(core: type[Model], name: Literal["fields"]) -> type[Model]:
    """Return a model of the core with the fields that side rooms add to it, and to the models in it.

    A class that extends a model of the core adds its fields, in the module of this name. The same holds of dataclasses
    that a model has lists of.
    """
    rooms = _extensions(core, name)
    inner: dict[str, Any] = {}
    for field, about in core.model_fields.items():
        kind = about.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and (made := extended(kind, name)) is not kind:
            inner[field] = made, made()
        elif get_origin(kind) is list and (more := _extensions(one := get_args(kind)[0], name)):
            inner[field] = list[_record(one, more) if is_dataclass(one) else extended(one, name)], ...  # type: ignore
    if not rooms and not inner:
        return core
    about_it = "\n\n".join(cleandoc(kind.__doc__) for kind in (core, *rooms) if kind.__doc__)
    return create_model(core.__name__, __base__=(*rooms[::-1],) or core, __doc__=about_it, **inner)


def _extensions(core: Any, name: Literal["fields"]) -> list[type[Any]]:
    if not isinstance(core, type):
        return []
    found = (kind for module in modules(name) for kind in vars(module).values() if isinstance(kind, type))
    return [kind for kind in dict.fromkeys(found) if issubclass(kind, core) and kind is not core]


def _record(core: Any, extensions: list[type[Any]]) -> type[Any]:
    return dataclass(frozen=True, kw_only=True)(type(core.__name__, (*extensions,), {"__doc__": core.__doc__}))
