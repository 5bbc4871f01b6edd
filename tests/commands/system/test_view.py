"""What `up` shows while the system starts and runs."""

from __future__ import annotations

import asyncio
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lightning_proxy.commands.system.up import UpView

STEP = {"reward_mean": 0.5, "version": 3.0}


def shown(*, live: bool = False) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=80, force_terminal=live, highlight=False), out


def test_elsewhere_than_on_a_terminal_every_line_has_its_date() -> None:
    console, out = shown()
    view = UpView(console)
    view.say("[red] is no markup")
    view.step(4, STEP)
    first, second = out.getvalue().splitlines()
    assert first[20:] == "[red] is no markup" and "step 4" in second and "reward 0.500" in second
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in (first, second))


async def test_what_is_added_to_the_proxys_log_is_shown_also_after_it_began_anew(tmp_path: Path) -> None:
    console, out = shown()
    log = tmp_path / "proxy.log"
    log.write_text("before\n")
    following = asyncio.create_task(UpView(console).follow(log))
    await asyncio.sleep(0)
    for text, mode, last in (("one\ntw", "a", "one"), ("o\n", "a", "two"), ("new\n", "w", "new")):
        with log.open(mode) as file:
            file.write(text)
        while last not in out.getvalue():
            assert not following.done()
            await asyncio.sleep(0.05)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert out.getvalue().splitlines() == ["one", "two", "new"]
