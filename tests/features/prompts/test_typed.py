"""`lightning-proxy prompts`: what one types to see and change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_prompts_are_added_compared_and_promoted(running: Running, tmp_path: Path) -> None:
    own, better = tmp_path / "own.txt", tmp_path / "better.txt"
    own.write_text("Be brief.\nBe kind.")
    better.write_text("Be brief.\nBe exact.")
    async with running(tmp_path) as system:
        assert (await system.lightning("prompts", "list")).stdout.startswith("no prompts yet: ")
        added = await system.lightning("prompts", "add", "writer", own, "--agent", "writer")
        assert added.stdout == "prompt writer version 1; it is live\n"
        added = await system.lightning("prompts", "add", "writer", better, "--comment", "exact")
        assert added.stdout == "prompt writer version 2; 1 is live\n"
        assert (await system.lightning("prompts", "show", "writer")).stdout == "Be brief.\nBe kind.\n"
        assert (
            await system.lightning("prompts", "show", "writer", "--version", "2")
        ).stdout == "Be brief.\nBe exact.\n"
        told = (await system.lightning("prompts", "diff", "writer", "1", "2")).stdout
        assert told.splitlines()[-3:] == [" Be brief.", "-Be kind.", "+Be exact."]
        promoted = await system.lightning("prompts", "promote", "writer", "2")
        assert promoted.stdout == "prompt writer version 2 is live\n"
        shown = (await system.lightning("prompts", "list")).stdout.splitlines()
        assert [line.split()[:3] for line in shown[1:]] == [["writer", "1", "writer"], ["writer", "2", "*"]]
        told = json.loads((await system.lightning("prompts", "rollback", "writer", "--json")).stdout)
        assert told["live_version"] == 1


async def test_what_is_wrong_is_one_line(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        missing = await system.lightning("prompts", "show", "nobody")
        assert (missing.returncode, missing.stderr) == (
            1,
            "lightning-proxy: GET /prompts/nobody: no prompt 'nobody' (HTTP 404)\n",
        )
        unread = await system.lightning("prompts", "add", "x", tmp_path / "none.txt")
        assert unread.returncode == 1 and "none.txt cannot be read" in unread.stderr
