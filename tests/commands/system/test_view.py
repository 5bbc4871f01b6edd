"""What `up` shows while the system starts and runs."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lightning_proxy.commands.system import processes
from lightning_proxy.commands.system.processes import ChildSpec, Supervisor, free_port
from lightning_proxy.commands.system.up import UpView

LOGS = Path("not-there")
# What vLLM prints while it starts; then it answers.
STARTS = """
import http.server, pathlib, sys, time
print("(EngineCore pid=7) INFO 11-25 16:41:06 [core.py:133] loading weights " + "x" * 100)
print("(EngineCore pid=7) INFO 11-25 16:41:06 [core.py:133] ")
while not pathlib.Path("go").exists(): time.sleep(0.02)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""
STEP = {"reward_mean": 0.5, "version": 3.0}


def shown(*, live: bool = False) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=80, force_terminal=live, highlight=False), out


def test_elsewhere_than_on_a_terminal_every_line_has_its_time() -> None:
    console, out = shown()
    with UpView(console, LOGS) as view:
        view.say("waiting for vllm")
        view.say("vllm is ready after 12s")
        view.step(4, STEP)
        assert view.serve_options == ("--log-format", "text")
    lines = out.getvalue().splitlines()
    assert [line[20:] for line in lines[:2]] == ["waiting for vllm", "vllm is ready after 12s"]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert "step 4" in lines[2] and "reward 0.500" in lines[2]


def test_on_a_terminal_a_line_is_shown_as_it_is() -> None:
    console, out = shown(live=True)
    with UpView(console, LOGS) as view:
        view.say("waiting for vllm")
        view.say("vllm is ready after 12s")
        view.say("[red] is no markup")
        assert view.serve_options == ("--log-format", "text", "--calls")
    assert "vllm is ready after 12s" in out.getvalue() and "[red] is no markup" in out.getvalue()


def test_programs_get_json() -> None:
    console, out = shown(live=True)
    with UpView(console, LOGS, "json") as view:
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
    following = asyncio.create_task(UpView(console, LOGS).follow(log))
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


@pytest.mark.parametrize("live", [True, False], ids=["terminal", "pipe"])
async def test_what_a_part_does_while_it_starts_is_shown_beside_the_time(
    live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "STILL_S", 0.1)
    console, out = shown(live=live)
    port, shown_line = free_port(), "loading weights" if live else "s: loading weights"
    spec = ChildSpec("vllm", [sys.executable, "-c", STARTS, str(port)], health_url=f"http://127.0.0.1:{port}/")
    with UpView(console, tmp_path) as view:
        async with Supervisor(tmp_path, view.say) as children:
            waiting = asyncio.create_task(children.wait_healthy(await children.start(spec)))
            while shown_line not in out.getvalue():
                assert not waiting.done()
                await asyncio.sleep(0.05)
            (tmp_path / "go").touch()
            await waiting
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    assert "vllm is ready after" in text and "core.py" not in text
    if live:
        assert re.search(r"waiting for vllm 0:00:0\d loading weights x+…", text) and "still" not in text
        assert max(map(len, text.splitlines())) <= 80
    else:
        assert re.search(r"\d\d:\d\d:\d\d still waiting for vllm after [\d.]+s: loading weights x+\n", text)
