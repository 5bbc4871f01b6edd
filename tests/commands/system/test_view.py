"""What `up` shows while the system starts and runs."""

from __future__ import annotations

import asyncio
import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lightning_proxy.commands.system.processes import ChildSpec, Supervisor
from lightning_proxy.commands.system.view import UpView

STEP = {"reward_mean": 0.5, "version": 3.0}


def shown(*, live: bool = False) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=80, force_terminal=live, highlight=False), out


def test_elsewhere_than_on_a_terminal_every_line_has_its_time() -> None:
    console, out = shown()
    with UpView(console) as view:
        view.say("waiting for vllm")
        view.say("vllm is ready after 12s")
        view.step(4, STEP)
        assert view.serve_options == ("--log-format", "text")
    lines = out.getvalue().splitlines()
    assert [line[9:] for line in lines[:2]] == ["waiting for vllm", "vllm is ready after 12s"]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert "step 4" in lines[2] and "reward 0.500" in lines[2]


def test_on_a_terminal_what_is_waited_for_is_shown_with_its_time_and_goes() -> None:
    console, out = shown(live=True)
    with UpView(console) as view:
        view.say("waiting for vllm")
        assert [task.description for task in view._progress.tasks] == ["waiting for vllm"]
        view.say("vllm is ready after 12s")
        assert view._progress.tasks == []
        view.say("[red] is no markup")
        assert view.serve_options == ("--log-format", "text", "--calls")
    assert "vllm is ready after 12s" in out.getvalue() and "[red] is no markup" in out.getvalue()


def test_programs_get_json() -> None:
    console, out = shown(live=True)
    with UpView(console, "json") as view:
        view.say("ready: " + "x" * 200)
        view.step(4, STEP)
        assert view.serve_options == ("--log-format", "json")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["event"], first["message"]) == ("up", "ready: " + "x" * 200)
    assert (second["event"], second["step"], second["metrics"]) == ("step", 4, STEP)


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


async def test_how_long_a_child_took_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, said.append) as children:
        await children.wait_healthy(await children.start(ChildSpec("one", ["sleep", "100"])))
    assert re.fullmatch(r"one is ready after [\d.]+s", said[1])
