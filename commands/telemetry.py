"""Turns off the telemetry of libraries, unless the user has set it."""

from __future__ import annotations

import os

# vLLM's and Ray's usage statistics, and what huggingface_hub, transformers and TRL report.
# litellm's is an attribute: core/prices.py.
OFF = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def telemetry_off() -> dict[str, str]:
    """Return the variables to set before the libraries are imported: those that are not set yet."""
    return {name: value for name, value in OFF.items() if name not in os.environ}
