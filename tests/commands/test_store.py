"""`store backup` and `store restore`."""

from __future__ import annotations

import asyncio
import json
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


async def test_a_store_is_copied_while_it_is_in_use_and_made_again_from_the_copy(
    running: Running, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy.db", tmp_path / "other"
    async with running(tmp_path) as system:
        await system.chat("r1")
        assert (await system.lightning("store", "backup", copy)).returncode == 0
        await system.chat("r2")
        again = await system.lightning("store", "backup", copy)
        assert (again.returncode, again.stderr) == (1, f"lightning-proxy: {copy} is there already: name a new file\n")
    assert not [file.name for file in tmp_path.iterdir() if ".part" in file.name]
    assert (await asyncio.to_thread(elsewhere, other, "restore", copy)).returncode == 0
    found = json.loads((await asyncio.to_thread(elsewhere, other, "info", "--json")).stdout)
    assert (found["rollouts"], found["calls"]) == ({"train running": 1}, 1)
    refused = await asyncio.to_thread(elsewhere, other, "restore", copy)
    assert refused.returncode == 1 and "there is a store at" in refused.stderr


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


def test_what_is_no_backup_is_not_restored(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no store at all")
    for name in ("text.db", "missing.db"):
        refused = elsewhere(tmp_path / "other", "restore", tmp_path / name)
        assert (refused.returncode, "is no backup of a store" in refused.stderr) == (1, True)
    assert not (tmp_path / "other" / "store.db").exists()
