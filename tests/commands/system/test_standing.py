"""What `up`, `demo` and `experiment` say of a trainer's warnings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightning_proxy.commands.system import steps

WAITS = "2026-11-26 03:20:2{} ERROR lightning_proxy.trainer.loop: step 3 waits to be saved: no space; free some space\n"
STEP = "2026-11-26 03:20:30,016 INFO lightning_proxy.commands.system.steps: step 3 reward 0.5\n"


async def test_a_warning_that_only_repeats_is_told_once_and_one_that_is_half_written_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    log, told = tmp_path / "trainer.log", list[str]()
    log.write_text(STEP + WAITS.format("4,016") + WAITS.format("6,020"))
    telling = asyncio.ensure_future(steps.say_warnings(log, told.append))
    for text in ("2026-11-26 03:20:31,016 WARNING lightning_proxy.trainer.loop: vLLM ", "is away\n"):
        with log.open("a") as file:
            file.write(text)
        await asyncio.sleep(0.1)
    while len(told) < 2:
        await asyncio.sleep(0.01)
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert told == ["trainer: step 3 waits to be saved: no space; free some space", "trainer: vLLM is away"]
