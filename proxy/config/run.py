"""The section `run`: on which machines `run`, `eval` and `optimize` start agent programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from .section import Seconds, Section, check_url


class KubernetesConfig(Section):
    image: str | None = None
    namespace: str | None = None
    context: str | None = None
    resources: dict[str, Any] = {"requests": {"cpu": "1"}}
    template: Path | None = None
    start_timeout_s: Seconds = 300.0


class RunConfig(Section):
    executor: Literal["local", "kubernetes"] = "local"
    proxy_url: str | None = None
    kubernetes: KubernetesConfig = KubernetesConfig()

    @field_validator("proxy_url")
    @classmethod
    def _can_be_asked(cls, url: str | None) -> str | None:
        if url is not None:
            check_url("proxy_url", url, is_vllm=False)
        return url
