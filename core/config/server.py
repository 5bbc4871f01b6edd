"""The sections `proxy`, `store` and `recording`: the server and the data that it keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator

from ..errors import ConfigError
from .address import shown
from .section import Above0, Count, Port, Positive, Seconds, Section, check_key


class LimitsConfig(Section):
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent: Count | None = None


class ProxyConfig(Section):
    host: str = "127.0.0.1"
    port: Port = 8080
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    api_keys: list[SecretStr] = []
    admin_keys: list[SecretStr] = []
    limits: LimitsConfig = LimitsConfig()
    max_body_mb: Positive = 32.0
    max_bodies_mb: Positive = 256.0
    body_timeout_s: Seconds = 60.0
    stop_timeout_s: Seconds = 5.0

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _can_be_sent(cls, keys: list[SecretStr]) -> list[SecretStr]:
        for key in keys:
            check_key("a key", key)
        return keys

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the proxy."""
        return self.host in ("127.0.0.1", "::1", "localhost")


def _pattern(text: str) -> str:
    try:
        if re.compile(text).search("") is not None:
            raise ValueError(f"{text!r} matches the empty string")
    except re.error as error:
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from None
    return text


def _path(text: str) -> str:
    if re.fullmatch(r"(request|response|metadata)(\.[^.]+)+", text, re.DOTALL) is None:
        raise ValueError(f"{text!r} is not a path such as request.user, response.choices.*.text or metadata.email")
    return text


class RedactConfig(Section):
    secrets: bool = False
    patterns: list[Annotated[str, AfterValidator(_pattern)]] = []
    fields: list[Annotated[str, AfterValidator(_path)]] = []


class RetentionConfig(Section):
    max_age_days: Above0 | None = None
    max_gib: Above0 | None = None


class StoreConfig(Section):
    url: str = "sqlite:///lightning.db"
    synchronous: Literal["normal", "full"] = "normal"
    busy_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 5.0  # in SQLite's milliseconds, .inf would be 0
    retention: RetentionConfig = RetentionConfig()

    @property
    def path(self) -> Path:
        """Return the file of a `sqlite:///…` URL. Three slashes start a relative path, four an absolute one.

        Raises ConfigError if the store is not a file.
        """
        if self.is_postgres:
            raise ConfigError(f"this command needs a SQLite store (store.url sqlite:///FILE), not {self.where}")
        return Path(self.url.removeprefix("sqlite:///")).expanduser()

    @property
    def is_postgres(self) -> bool:
        return self.url.startswith("postgresql://")

    @property
    def may_be_there(self) -> bool:
        """Return whether the store may exist: either its file exists, or it is on a server."""
        return self.is_postgres or self.path.is_file()

    @property
    def where(self) -> str:
        """Return the store's location for display: a file, or a URL without its password."""
        return shown(self.url) if self.is_postgres else str(self.path.absolute())

    def faults(self) -> Iterator[str]:
        if self.is_postgres and self.retention.max_gib is not None:
            yield "retention.max_gib works only with a SQLite file; use retention.max_age_days with PostgreSQL"
        if not self.is_postgres and not re.match("sqlite:///.", self.url):
            yield f"url must be sqlite:///FILE or postgresql://USER@HOST/DATABASE, got {shown(self.url)!r}"


class RecordingConfig(Section):
    on_disconnect: Literal["abort", "finish"] = "abort"
    finish_timeout_s: Seconds = 300.0
    redact: RedactConfig = RedactConfig()
