"""The base class and the types of all sections of the configuration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

Port = Annotated[int, Field(ge=0, le=65535)]


Gpu = Annotated[int, Field(ge=0)]


Seconds = Annotated[float, Field(gt=0)]


Limit = Annotated[int, Field(ge=1)] | None


Number = Annotated[float, Field(allow_inf_nan=False)]


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


NOT_SENDABLE = "it must be ASCII without spaces or line ends, and not empty"


def is_sendable(key: SecretStr) -> bool:
    """Return whether a header can carry this key unchanged."""
    text = key.get_secret_value()
    return text != "" and text.isascii() and text.isprintable() and " " not in text


def _off(value: Any) -> Any:
    """YAML reads `off` without quotes as false."""
    return "off" if value is False else value


CanBeOff = BeforeValidator(_off)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
