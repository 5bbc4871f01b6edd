"""Lists and views show the same of a store alone, where no proxy runs, and write nothing to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from support.command_line import lightning

Running = Callable[..., AbstractAsyncContextManager[Any]]

COMMANDS = [
    ("rollouts", "list", "--json"),
    ("rollouts", "list", "--grep", "hi", "--json"),
    ("rollouts", "show", "r:1", "--json"),
    ("rollouts", "diff", "r:1", "r2"),
    ("policy", "list", "--json"),
    ("costs", "--by", "rollout", "--json"),
    ("prompts", "list", "--json"),
    ("prompts", "show", "writer"),
]


async def test_a_store_alone_shows_what_the_proxy_showed(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        key = {"Authorization": "Bearer agent"}
        for name in ("r:1", "r2"):
            assert (await system.chat(name, **key))[0] == 200
        posted = {"rollout_id": "r2", "reward": 0.5}
        assert (await system.call("POST", "/reward", posted, **key))[0] == 200
        assert (await system.call("POST", "/prompts", {"name": "writer", "text": "You write."}, **key))[0] == 200
        monkeypatch.setenv("LIGHTNING_API_KEY", "agent")
        before = [await system.lightning(*command) for command in COMMANDS]
    monkeypatch.delenv("LIGHTNING_API_KEY")  # whoever can read the file needs none
    for command, shown in zip(COMMANDS, before, strict=True):
        done = await asyncio.to_thread(lightning, "--config", system.vllm.root / "system.yaml", *command)
        assert (done.returncode, done.stdout) == (0, shown.stdout), (command, done.stderr)
        assert f"no proxy answers at {system.url}: this is the store {system.config.store.where}\n" == done.stderr
    changed = await asyncio.to_thread(lightning, "--config", system.vllm.root / "system.yaml", "rollouts", "end", "r2")
    assert changed.returncode == 1 and "start it with `lightning-proxy serve`" in changed.stderr
