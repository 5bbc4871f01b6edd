"""The section `ray`: the cluster, and the resources and environment that each program gets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from ...core.config.section import FeatureSection

Option = Literal[
    "num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector", "scheduling_strategy"
]


class RayConfig(FeatureSection):
    name = "ray"
    moved = {"run.ray": "ray"}

    address: str = "auto"
    options: dict[Option, Any] = {"num_cpus": 1}
    runtime_env: dict[str, Any] = {}

    @field_validator("address")
    @classmethod
    def _is_of_this_cluster(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError("Ray's client (ray://) cannot be used: start the command on a machine of the cluster")
        return address
