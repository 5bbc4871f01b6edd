"""`make setup` looks at the NVIDIA driver before it installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

SMI = """#!/bin/sh
case "$*" in
    -L) echo "GPU 0: NVIDIA H100 (UUID: GPU-0)";;
    *driver_version*) echo {driver}; echo {driver};;
esac
"""


def set_up(directory: Path, driver: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make setup` in a checkout without anything else, with an uv that only notes what it was asked for."""
    programs = directory / "bin"
    programs.mkdir()
    for name, text in (("uv", f'#!/bin/sh\necho "$@" >> {directory}/asked\n'), ("nvidia-smi", driver)):
        if text is not None:
            (programs / name).write_text(text if name == "uv" else SMI.format(driver=driver))
            (programs / name).chmod(0o755)
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, directory)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "UV_", "PIP_"))}
    command = ["make", "setup", *arguments]
    return subprocess.run(command, cwd=directory, env=clean | path, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("driver", ["570.172.08", "535.54.03"])
def test_a_driver_too_old_for_cuda_13_is_one_line_and_nothing_is_installed(tmp_path: Path, driver: str) -> None:
    done = set_up(tmp_path, driver)
    assert done.returncode == 2
    line, *_ = done.stderr.splitlines()
    assert line.startswith(f"NVIDIA driver {driver} is too old for CUDA 13: install 580 or newer")
    assert "setting up" not in done.stdout
    assert not (tmp_path / "asked").exists() and not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("driver", "arguments", "extra"), [("580.65.06", (), "vllm"), ("570.1", ("GPU=",), "cpu"), (None, (), None)]
)
def test_a_new_driver_or_none_is_set_up(
    tmp_path: Path, driver: str | None, arguments: tuple[str, ...], extra: str | None
) -> None:
    done = set_up(tmp_path, driver, *arguments)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text()
    assert f"-e .[{extra or ''}" in asked
