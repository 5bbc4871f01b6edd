"""A child that finds no memory is tried again for a while; one that is not ready in time is given up."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from lightning_proxy.commands.system import processes
from lightning_proxy.commands.system.processes import ChildDied, ChildSpec, Supervisor
from lightning_proxy.commands.system.system import NO_MEMORY
from lightning_proxy.core.errors import LightningError

# vLLM 0.32's own words.
WORDS = (
    "ValueError: Free memory on device cuda:0 (9.1/23.6 GiB) on startup is less than desired GPU memory utilization "
    "(0.55, 13.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
KILLED = "ValueError: the model's code is wrong; an earlier start ran out of room"


def dying(directory: Path, deaths: int, words: str, later: str = "") -> ChildSpec:
    """A program that dies so many times, first with `words`, then with those or `later`; then it says that it runs."""
    script = f"""
import pathlib, sys, time
tries = pathlib.Path({str(directory)!r}, "tries")
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) == 1: sys.exit({words!r})
if len(tries.read_text()) <= {deaths}: sys.exit({later or words!r})
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


async def test_what_an_earlier_start_said_is_no_reason_to_be_patient(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, said.append) as children, asyncio.timeout(60):
        await children.start(dying(tmp_path, 4, WORDS, KILLED))
        with pytest.raises(ChildDied, match=KILLED[:10]):
            await children.guard(asyncio.sleep(1000))
    assert ["for want of memory" in line for line in said if "vllm ended" in line] == [True, False]


async def test_a_child_that_is_not_ready_in_time_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(1000)"]
    async with Supervisor(tmp_path) as children:
        child = await children.start(ChildSpec("vllm", command, {}, "http://127.0.0.1:9/", start_timeout_s=1.0))
        with pytest.raises(LightningError, match="vllm was not ready after 1.0s: loading"):
            await children.wait_healthy(child)
