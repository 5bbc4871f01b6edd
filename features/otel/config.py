"""The section `otel`: where spans of recorded calls go."""

from __future__ import annotations

from pydantic import SecretStr, field_validator

from ...core.config.section import FeatureSection, Seconds


class OtelConfig(FeatureSection):
    name = "otel"
    moved = {"telemetry": "otel"}

    otlp_endpoint: str | None = None
    otlp_headers: dict[str, SecretStr] = {}
    content: bool = False
    timeout_s: Seconds = 10.0

    @property
    def traces_url(self) -> str:
        return f"{(self.otlp_endpoint or '').rstrip('/')}/v1/traces"

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"an http(s) URL is needed, such as http://127.0.0.1:4318, got {url!r}")
        return url
