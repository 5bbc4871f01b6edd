"""The page's view of prompts: versions with their rewards, and two texts side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from support.views import drawn, needs_node

Running = Callable[..., AbstractAsyncContextManager[Any]]
HOSTILE = "<img src=x onerror=window.hurt=1>"
OWN, BETTER = (f"You are a writer.\n{more}{HOSTILE}" for more in ("", "Count your words. "))


@needs_node
async def test_versions_are_seen_with_their_rewards_and_what_differs(running: Running, tmp_path: Path) -> None:
    own = {"name": "writer", "text": OWN, "match": {"agent": "writer"}}
    better = {"name": "writer", "text": BETTER, "parent": 1, "comment": HOSTILE, "metrics": {HOSTILE: 0.5}}
    async with running(tmp_path) as system:
        for body in (own, better):
            assert (await system.call("POST", "/prompts", body))[0] == 200
        for reward in (1.0, 0.5, 0.75):
            _, (opened,) = await system.call("POST", "/rollouts", {"task_id": "t1", "prompts": {"writer": 2}})
            await system.call("POST", "/reward", {"rollout_id": opened["rollout_id"], "reward": reward})
        listed, version, none = await drawn(system, tmp_path, "prompts", "prompts/writer/2", "prompts/writer/9")
    assert "version 20.75 of 3" in listed["text"] and "version 1live" in listed["text"]
    assert {"del", "ins"} <= {*version["tags"]} and "img" not in version["tags"]
    assert f"You are a writer.\nCount your words. {HOSTILE}\n" in version["text"]
    assert f"comment{HOSTILE}" in version["text"] and "There is no such version" in none["text"]
