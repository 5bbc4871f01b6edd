"""The section `otel`: where spans of recorded calls go."""

from __future__ import annotations

from pydantic import SecretStr, field_validator

from ...core.config.section import FeatureSection, check_url


class OtelConfig(FeatureSection):
    name = "otel"
    moved = {"telemetry": "otel"}

    otlp_endpoint: str | None = None
    otlp_headers: dict[str, SecretStr] = {}

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        return None if url is None else check_url("otlp_endpoint", url, is_vllm=False)
