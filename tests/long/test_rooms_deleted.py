"""Each side room can be deleted: its folders, its line, its tests. What is left imports, helps, and learns."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_proxy.commands import on_board as commands
from lightning_proxy.proxy import on_board as proxys
from lightning_proxy.trainer.plugins import on_board as trainers
from support.paths import ROOT

ON_BOARD = {"proxy": proxys.ON_BOARD, "trainer": trainers.ON_BOARD, "commands": commands.ON_BOARD}
LISTS = ("proxy/on_board.py", "trainer/plugins/on_board.py", "commands/on_board.py")
ROOMS = sorted({room.replace(".", "/") for rooms in ON_BOARD.values() for room in rooms})
# Rooms that are there for side rooms alone.
SHARED = ("tuning",)
LEFT = """
import importlib, pkgutil, lightning_proxy as root
assert root.__file__.startswith({place!r}), root.__file__
for module in pkgutil.walk_packages(root.__path__, "lightning_proxy."):
    if module.name.split(".")[1] in ("proxy", "trainer", "commands", "client", "cli"):
        if not module.name.endswith("executors.ray.driver"):
            importlib.import_module(module.name)
"""
# A key of each room that has some. A room that was taken out leaves none behind.
KEYS = {
    "otel": "telemetry", "promotion": "policy.gate", "rewarders": "trainer.judge",
    "guides": "trainer.teacher", "algorithms": "trainer.mask",
    "evaluation": "trainer.eval", "contexts": "trainer.rejected",
    "sft": "trainer.sft", "preferences": "trainer.kto", "backends": "trainer.tinker",
}  # fmt: skip
UNKNOWN = """
from lightning_proxy.proxy.config.file import load_config
from lightning_proxy.proxy.errors import ConfigError
for key in {keys!r}:
    try:
        load_config(overrides={{key: {{}}}})
    except ConfigError as error:
        assert f"command line: {{key}}: unknown key" in str(error), error
    else:
        raise AssertionError(key)
"""
LEARNS = "tests/contract/test_training.py::test_a_step_publishes_a_verified_version_that_answers_the_next_call"
REALLY = "tests/contract/test_loop.py"


class Copy:
    """A copy of the tree without some side rooms."""

    def __init__(self, directory: Path, rooms: list[str]) -> None:
        self.directory, self.tree = directory, directory / "lightning_proxy"
        self.tree.mkdir()
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        for name in names:
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.tree / name)
        for room in rooms:
            self._delete(room)

    def _delete(self, room: str) -> None:
        for top in ("proxy", "trainer", "commands"):
            for place in (top, f"tests/{top}"):
                shutil.rmtree(self.tree / place / room, ignore_errors=True)
        for file in LISTS if room not in SHARED else ():
            self._drop(file, re.escape(f'    "{room.replace("/", ".")}",'))

    def _drop(self, file: str, line: str) -> None:
        path = self.tree / file
        path.write_text(re.sub(rf"^{line}\n", "", path.read_text(), flags=re.MULTILINE))

    def run(self, *arguments: str) -> str:
        """Run Python on the copy; return what it prints."""
        command = [sys.executable, *arguments]
        environment = {"PYTHONPATH": str(self.directory), "PATH": "/usr/bin:/bin", "HOME": str(self.directory)}
        done = subprocess.run(
            command, cwd=self.tree, env=environment, check=False, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rooms", [*([room] for room in ROOMS), [*ROOMS, *SHARED]], ids=[*ROOMS, "all"])
def test_side_rooms_can_be_deleted(tmp_path: Path, rooms: list[str]) -> None:
    copy = Copy(tmp_path, rooms)
    copy.run("-W", "ignore", "-c", LEFT.format(place=str(tmp_path)))
    copy.run("-c", UNKNOWN.format(keys=[KEYS[room] for room in rooms if room in KEYS]))
    assert "train" in copy.run("-m", "lightning_proxy.cli", "--help")
    assert "2 passed" in copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", LEARNS)


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_all_side_rooms_can_be_deleted_and_an_agent_gets_better(tmp_path: Path) -> None:
    copy = Copy(tmp_path, [*ROOMS, *SHARED])
    copy.run("-W", "ignore", "-c", LEFT.format(place=str(tmp_path)))
    assert "passed" in copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", REALLY)
