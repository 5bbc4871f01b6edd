"""What `up`, `demo` and `experiment` say of a trainer that stands still."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lightning_proxy.commands.system import steps, up
from lightning_proxy.commands.system.up import UpView
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig

WAITS = "2026-11-26 03:20:2{} ERROR lightning_proxy.trainer.loop: step 3 waits to be saved: no space; free some space\n"
STEP = "2026-11-26 03:20:30,016 INFO lightning_proxy.commands.system.steps: step 3 reward 0.5\n"


async def test_a_warning_that_only_repeats_is_told_once_until_another_line_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "WARNED_S", 0.0)
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    log, told = tmp_path / "trainer.log", list[str]()
    log.write_text(STEP)
    telling = asyncio.ensure_future(steps.report_standstill(log, told.append))
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


async def test_up_tells_a_trainers_warning_and_is_quiet_while_a_trainer_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "WARNED_S", 0.0)
    monkeypatch.setattr(steps, "SILENT_S", 0.0)
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    (tmp_path / "proxy.log").touch()
    log, out = tmp_path / "trainer.log", StringIO()
    log.write_text(STEP)
    upstream = UpstreamConfig(name="policy", base_url="http://127.0.0.1:9/v1")
    config = Config(store=StoreConfig(url=f"sqlite:///{tmp_path}/s.db"), upstreams=[upstream])
    showing = asyncio.ensure_future(up._show(config, tmp_path, UpView(Console(file=out, width=200))))
    await asyncio.sleep(0.2)
    assert out.getvalue() == ""
    with log.open("a") as file:
        file.write(WAITS.format("4,016"))
    while "waits to be saved" not in out.getvalue():
        await asyncio.sleep(0.01)
    showing.cancel()
    with suppress(asyncio.CancelledError):
        await showing
