"""Manages the files of policy versions, and decides which to keep."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from ...core.config.policy import PolicyConfig
from ...core.errors import LightningError
from ...core.records import PolicyVersion
from ...serving.swap import Swap
from ...store.store import Store


class VersionFiles:
    """The directories of policy versions, `policy.directory`/versions/vN."""

    def __init__(self, config: PolicyConfig, store: Store, swap: Swap) -> None:
        self._config = config
        self._store = store
        self._swap = swap
        self._directory = config.directory.absolute() / "versions"

    def path(self, version: int) -> Path:
        return self._directory / f"v{version}"

    async def delete(self, version: int) -> None:
        await asyncio.to_thread(shutil.rmtree, self.path(version), ignore_errors=True)

    async def remove(self, version: PolicyVersion) -> None:
        """Unload the version from vLLM and delete its files. It can never be promoted again."""
        if self._swap.mode == "lora":
            with suppress(LightningError):  # a server that is away has unloaded it already
                await self._swap.unload(version)
        await self._store.versions.forget_files(version.version)
        await self.delete(version.version)

    async def prune(self, keep: Set[int]) -> None:
        """Remove all versions but the newest, the live one, those of running rollouts, and those in `keep`.

        Versions that never went live (`policy.promotion: gated`) take no place among the newest: one of them is kept.
        """
        versions = await self._store.versions.with_files()
        tested = {v.version for v in versions if v.status in ("waiting", "candidate")}
        passed_by = [v for v in versions if v.live_at is None and v.status in ("ready", "rejected")]
        others = [v for v in versions if v not in passed_by]
        newest = {v.version for v in (*others[-self._config.keep_versions :], *passed_by[-1:])}
        kept = newest | tested | {(await self._store.versions.live()).version}
        if self._swap.mode == "lora":
            kept |= await self._store.versions.pinned(time.time() - self._config.pin_timeout_s)
        for version in versions:
            if version.version not in kept | keep:
                await self.remove(version)
