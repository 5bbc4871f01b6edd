"""A child that finds no memory is tried again for a while; one that still downloads is given time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from lightning_proxy.commands.system import processes
from lightning_proxy.commands.system.processes import ChildDied, ChildSpec, Supervisor, free_port
from lightning_proxy.commands.system.system import NO_MEMORY, downloaded
from lightning_proxy.core.errors import LightningError

# vLLM 0.32's own words.
WORDS = (
    "ValueError: Free memory on device cuda:0 (9.1/23.6 GiB) on startup is less than desired GPU memory utilization "
    "(0.55, 13.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
KILLED = "ValueError: the model's code is wrong; an earlier start ran out of room"


def dying(directory: Path, deaths: int, words: str) -> ChildSpec:
    """A program that dies with these words so many times, then says that it runs."""
    script = f"""
import pathlib, sys, time
tries = pathlib.Path({str(directory)!r}, "tries")
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) <= {deaths}: sys.exit({words!r})
print("it runs", flush=True)
time.sleep(1000)
"""
    return ChildSpec("vllm", [sys.executable, "-c", script], restarts=1, shortage=NO_MEMORY)


async def running(log: Path) -> None:
    while "it runs" not in log.read_text():
        await asyncio.sleep(0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(processes, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(processes, "SHORTAGE_DELAY_S", 0.01)
    return monkeypatch


async def test_a_child_without_memory_is_tried_again_more_often_than_it_may_die(
    tmp_path: Path, quick: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, said.append) as children:
        child = await children.start(dying(tmp_path, 4, WORDS))
        await children.guard(running(tmp_path / "vllm.log"))
        assert child.running
    assert sum("for want of memory: trying again for 30 min" in line for line in said) == 4


async def test_its_patience_ends_and_other_deaths_count_as_ever(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    quick.setattr(processes, "SHORTAGE_S", 0.0)
    for number, words in enumerate((WORDS, KILLED)):
        directory = tmp_path / str(number)
        directory.mkdir()
        async with Supervisor(directory) as children:
            await children.start(dying(directory, 4, words))
            with pytest.raises(ChildDied, match=words.split(":")[0]):
                await children.guard(asyncio.sleep(1000))
        assert (directory / "tries").read_text() == "xx"


@pytest.mark.parametrize(("progress", "ready"), [(count().__next__, True), (lambda: 7, False)])
async def test_the_time_to_start_begins_anew_while_a_download_goes_on(
    tmp_path: Path, quick: pytest.MonkeyPatch, progress: Callable[[], int], ready: bool
) -> None:
    port = free_port()
    script = f"""
import http.server, time
time.sleep(3)
http.server.HTTPServer(("127.0.0.1", {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
    url = f"http://127.0.0.1:{port}/"
    spec = ChildSpec("vllm", [sys.executable, "-c", script], {}, url, start_timeout_s=1.0, progress=progress)
    async with Supervisor(tmp_path) as children:
        child = await children.start(spec)
        if ready:
            await children.wait_healthy(child)
        else:
            with pytest.raises(LightningError, match="vllm was not ready after 1 s"):
                await children.wait_healthy(child)


def test_half_written_files_of_the_model_count_and_those_of_others_do_not(tmp_path: Path) -> None:
    options = ["--seed", "1", "--download-dir", str(tmp_path)]
    assert downloaded("no/such-model") == downloaded("Qwen/Qwen3-4B", options) == 0
    blobs = tmp_path / "models--Qwen--Qwen3-4B/blobs"
    other = tmp_path / "models--Qwen--Qwen3-8B/blobs"
    for folder, name, size in ((blobs, "a", 5), (blobs, "b.incomplete", 7), (other, "c", 11)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    snapshot = tmp_path / "models--Qwen--Qwen3-4B/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blobs / "a")
    assert downloaded("Qwen/Qwen3-4B", options) == 12
    assert downloaded("Qwen/Qwen3-8B", [f"--download-dir={tmp_path}"]) == 11
