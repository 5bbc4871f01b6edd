"""`lightning-proxy prompts`: what one types to see and change them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_prompts_are_added_shown_and_promoted(running: Running, tmp_path: Path) -> None:
    own, better = tmp_path / "own.txt", tmp_path / "better.txt"
    own.write_text("Be brief.\nBe kind.")
    better.write_text("Be brief.\nBe exact.")
    async with running(tmp_path) as system:

        async def typed(*words: object) -> str:
            return str((await system.lightning("prompts", *words)).stdout)

        assert (await typed("list")).startswith("no prompts yet: ")
        assert await typed("add", "writer", own, "--agent", "writer") == "prompt writer version 1; it is live\n"
        assert await typed("add", "writer", better, "--comment", "exact") == "prompt writer version 2; 1 is live\n"
        assert await typed("show", "writer") == "Be brief.\nBe kind.\n"
        assert await typed("show", "writer", "--version", "2") == "Be brief.\nBe exact.\n"
        assert await typed("promote", "writer", "2") == "prompt writer version 2 is live\n"
        shown = (await typed("list")).splitlines()
        assert [line.split()[:3] for line in shown[1:]] == [["writer", "1", "writer"], ["writer", "2", "*"]]
        assert await typed("rollback", "writer") == "prompt writer version 1 is live\n"
        missing = await system.lightning("prompts", "show", "nobody")
        wrong = "lightning-proxy: GET /prompts/nobody: no prompt 'nobody' (HTTP 404)\n"
        assert (missing.returncode, missing.stderr) == (1, wrong)
        unread = await system.lightning("prompts", "add", "x", tmp_path / "none.txt")
        assert unread.returncode == 1 and "none.txt cannot be read" in unread.stderr
