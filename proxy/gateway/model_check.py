"""Refuses to open a rollout for a policy version or model that cannot be served."""

from __future__ import annotations

from pathlib import Path

from ...core.config.root import Config
from ...core.errors import Conflict, NotFound
from ...core.records import PolicyVersion
from ...serving.swap import Swap
from ...store.store import Store
from .routing import models_by_upstream


class ModelCheck:
    """Refuses an unavailable model when a rollout is opened, so that its first call does not fail."""

    def __init__(self, config: Config, store: Store, swap: Swap | None) -> None:
        self._policy = config.policy
        self._named = models_by_upstream(config.upstreams)
        self._first = config.upstreams[0]
        self._store = store
        self._swap = swap

    async def require(self, policy_version: int | None, model: str | None) -> None:
        """Raise NotFound or Conflict if the model cannot be served. Both None means the live version, always served."""
        if policy_version is not None and model is not None:
            raise Conflict("policy_version and model exclude each other", param="model")
        if policy_version is not None:
            await self._require_version(policy_version)
        if model is not None and model not in self._named and not await self._first_serves(model):
            raise NotFound(f"no upstream serves the model {model!r}: name it in the `models` of one", param="model")

    async def _require_version(self, number: int) -> None:
        """Have the version served beside the live one; Conflict if it cannot be, NotFound if there is none."""
        version, live = await self._store.versions.get(number), await self._store.versions.live()
        if version.version == live.version:
            return
        if self._swap is None:
            raise Conflict("no upstream is of kind vllm: there are no policy versions", param="policy_version")
        if self._swap.mode == "merged":
            raise Conflict(
                f"policy version {number} is not served: with policy.publish: merged the live one alone is, version "
                f"{live.version}; promote it first (`eval --promote` does, and takes it back)",
                param="policy_version",
            )
        if not self._policy.pin_rollouts:
            raise Conflict("with policy.pin_rollouts: false only the live version answers", param="policy_version")
        _require_files(version)
        await self._swap.load(version)

    async def _first_serves(self, name: str) -> bool:
        """The first upstream gets every model that none names; only the policy's vLLM says which it has."""
        if self._swap is None or self._first.kind != "vllm":
            return self._first.kind != "litellm"
        return name == self._policy.alias or name in {model["id"] for model in await self._swap.vllm.models()}


def _require_files(version: PolicyVersion) -> None:
    if version.version == 0:
        return
    if version.publish != "lora":
        as_what = f"published as {version.publish}, and policy.publish is now lora"
        raise Conflict(f"policy version {version.version} was {as_what}", param="policy_version")
    if version.status in ("publishing", "failed") or version.path is None or not Path(version.path).is_dir():
        gone = "its files are gone (policy.keep_versions)" if version.status == "ready" else f"it is {version.status}"
        raise Conflict(f"policy version {version.version} cannot be served: {gone}", param="policy_version")
