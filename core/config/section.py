"""The base class and the types of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from .address import shown

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


def check_url(key: str, url: str, *, is_vllm: bool) -> None:
    """Raise ValueError unless `url`, the value of `key`, is one that can be requested."""
    parts = urlsplit(url)
    try:
        host, _ = parts.hostname, parts.port
    except ValueError:  # no number; its own message quotes what may be a password with a slash in it
        host = None
    if parts.scheme not in ("http", "https") or not host or parts.fragment:
        raise ValueError(f"{key} must be an http(s) URL, got {shown(url)!r}")
    if is_vllm and (parts.query or not parts.path.strip("/")):
        raise ValueError(f"{key} of a vLLM must have a path, as a rule /v1, and no query; got {shown(url)!r}")


def _off(value: Any) -> Any:
    """YAML reads `off` without quotes as false."""
    return "off" if value is False else value


CanBeOff = BeforeValidator(_off)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def secret_keys(self) -> Iterator[str]:
        """Yield the keys that are kept secret, also those in the sections of this one."""
        for _, value in self:
            for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
                if isinstance(one, SecretStr):
                    yield one.get_secret_value()
                elif isinstance(one, Section):
                    yield from one.secret_keys()
