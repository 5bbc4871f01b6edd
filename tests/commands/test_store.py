"""`store backup` and `store restore`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from support.command_line import Done, lightning

Running = Callable[..., Any]


def elsewhere(directory: Path, *arguments: str | Path) -> Done:
    """A `store` command whose store is in this directory."""
    directory.mkdir(exist_ok=True)
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump({"store": {"url": f"sqlite:///{directory}/store.db"}}))
    return lightning("--config", config, "store", *arguments)


async def test_a_restored_store_says_which_weights_are_missing(running: Running, tmp_path: Path) -> None:
    copy, weights = tmp_path / "copy.db", tmp_path / "weights"
    weights.mkdir()
    async with running(tmp_path) as system:
        async with system.store() as store:
            version = await system.earlier_version(store, weights)
            await store.versions.set_live(version)
        assert (await system.lightning("store", "backup", copy)).returncode == 0
    assert not (await asyncio.to_thread(elsewhere, tmp_path / "one", "restore", copy)).stderr
    (weights / f"v{version}").rmdir()
    done = await asyncio.to_thread(elsewhere, tmp_path / "other", "restore", copy)
    assert done.returncode == 0 and f"policy version {version} is live, and its weights are not at " in done.stderr
