"""What `demo` and `experiment` say of a trainer that stands still."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_proxy.commands.system import steps
from lightning_proxy.commands.system.reason import newest_of_trainer

WAITS = "2026-11-26 03:20:2{} ERROR lightning_proxy.trainer.loop: step 3 waits to be saved: no space; free some space\n"
STEP = "2026-11-26 03:20:30,016 INFO lightning_proxy.commands.system.steps: step 3 reward 0.5\n"


def test_the_newest_message_of_a_trainer_is_known_and_whether_it_warns(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    assert newest_of_trainer(log) == ("", False)
    log.write_text(STEP + WAITS.format("4,016"))
    assert newest_of_trainer(log) == ("step 3 waits to be saved: no space; free some space", True)
    log.write_text(WAITS.format("4,016") + STEP)
    assert newest_of_trainer(log) == ("step 3 reward 0.5", False)
    log.write_text("Loading weights: 100%")
    assert newest_of_trainer(log) == ("Loading weights: 100%", False)


async def test_a_warning_that_only_repeats_is_told_once_until_another_line_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "WARNED_S", 0.0)
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    log, told = tmp_path / "trainer.log", list[str]()
    log.write_text(STEP)
    telling = asyncio.ensure_future(steps.tell_why_it_stands(log, told.append))
    for n, lines in enumerate(("4,016", "6,020", "8,100")):
        with log.open("a") as file:
            file.write(WAITS.format(lines))
        while not told:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05 * n)
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling
    assert told == [
        f"the trainer says nothing new for 0.0s: step 3 waits to be saved: no space; free some space; see {log}"
    ]
