"""The sections `policy` and `vllm`: the weights that are trained, and the server that serves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from .section import Above0, Count, Natural, Port, Section, Share

# The adapter of agents that have none of their own. PEFT calls it so.
DEFAULT_ADAPTER = "default"
# It becomes part of names of files, served models and PyTorch modules.
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
ModelName = Annotated[str, AfterValidator(lambda name: str(Path(name).expanduser()) if name.startswith("~") else name)]


class PolicyConfig(Section):
    model: ModelName | None = None
    alias: str = "policy"
    publish: Literal["lora", "merged", "auto"] = "auto"
    adapters: dict[AdapterName, Annotated[list[str], Field(min_length=1)]] = {}
    pin_rollouts: bool = True
    token_continuity: Literal["text", "exact"] = "text"
    dialects_through_chat: bool = True
    keep_versions: Annotated[int, Field(ge=2)] = 3
    directory: Path = Path("lightning-policy")
    verify_samples: Count = 4
    verify_tolerance: Above0 | None = None

    @field_validator("adapters")
    @classmethod
    def _name_an_agent_once(cls, adapters: dict[str, list[str]]) -> dict[str, list[str]]:
        if DEFAULT_ADAPTER in adapters:
            raise ValueError(f"{DEFAULT_ADAPTER!r} is the adapter of agents that are in no list: choose another name")
        named = [agent for agents in adapters.values() for agent in agents]
        if twice := sorted({agent for agent in named if named.count(agent) > 1}):
            raise ValueError(f"each agent has one adapter, but these agents are named twice: {', '.join(twice)}")
        return adapters

    def faults(self) -> Iterator[str]:
        if self.adapters and self.publish == "merged":
            yield "policy.adapters needs policy.publish: lora or auto; merged weights can hold only one adapter"

    def adapter_of(self, agent: str | None) -> str:
        """Return the name of the adapter that answers this agent's calls."""
        return next((name for name, agents in self.adapters.items() if agent in agents), DEFAULT_ADAPTER)


class VllmConfig(Section):
    port: Port = 8100
    max_model_len: int | None = None
    kv_cache_gib: Above0 = 2.0
    devices: list[Natural] = []
    gpu_memory_utilization: Share | None = None
    extra_args: list[str] = []
