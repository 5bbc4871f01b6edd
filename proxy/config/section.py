"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr

Port = Annotated[int, Field(ge=0, le=65535)]


Seconds = Annotated[float, Field(gt=0)]


Limit = Annotated[int, Field(ge=1)] | None


Number = Annotated[float, Field(allow_inf_nan=False)]


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


NOT_SENDABLE = "it may not be empty, nor hold spaces, line ends or other than ASCII characters"


def is_sendable(key: SecretStr) -> bool:
    """Whether a header can carry it, and nothing else is read as it."""
    text = key.get_secret_value()
    return text != "" and text.isascii() and text.isprintable() and " " not in text


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
