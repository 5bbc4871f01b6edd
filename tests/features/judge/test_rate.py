"""`rollouts rate` takes a person's rewards line by line."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.judge import rate
from support.rewarded_by import completed

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_a_person_rates_rollouts_and_calls_and_undoes(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as system:
        for name in ("a", "b", "c"):
            await completed(system, name, f"I am {name}.")
        lines = ["call 0 - too long", "call 7 +", "what?", "+", "0.5 fine", "u", "", "-1", "q"]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        done = await system.lightning("rollouts", "rate", "--as", "anna")
        assert done.returncode == 0, done.stderr
        assert "3 to rate as anna" in done.stdout and "it has no call 7" in done.stdout
        found = {name: (await system.call("GET", f"/rollouts/{name}"))[1]["rewards"] for name in "cba"}
        again = await system.lightning("rollouts", "rate", "--order", "best")
    given = {name: [(one["reward"], one["comment"], one["source"]) for one in of] for name, of in found.items()}
    assert given == {"c": [(-1, "too long", "anna"), (1, None, "anna")], "b": [], "a": [(-1, None, "anna")]}
    assert [one["call_id"] is None for one in found["c"]] == [False, True]
    assert again.returncode == 2 and "--order is newest, uncertain, random" in again.stderr


async def test_ctrl_c_at_a_terminal_waits_for_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    person, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(person, b"0.5 fine\n-1\n")
        assert [await rate.read_line("1> ") for _ in range(2)] == ["0.5 fine\n", "-1\n"]
        threads = threading.active_count()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rate.read_line("2> "), 0.1)
        assert threading.active_count() == threads
        os.write(person, b"\x04")
        with pytest.raises(EOFError):
            await rate.read_line("2> ")
    os.close(person)
