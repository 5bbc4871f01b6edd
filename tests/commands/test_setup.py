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


@pytest.mark.parametrize(
    ("driver", "arguments", "extra"),
    [
        ("580.65.06", (), "vllm"), ("570.1", ("GPU=",), "cpu"), (None, (), ""), ("570.172.08", (), None),
    ],
)  # fmt: skip
def test_a_driver_too_old_for_cuda_13_is_one_line_and_nothing_is_installed(
    tmp_path: Path, driver: str | None, arguments: tuple[str, ...], extra: str | None
) -> None:
    """In a checkout without anything else, with an uv that only notes what it was asked for."""
    (programs := tmp_path / "bin").mkdir()
    (programs / "uv").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    if driver is not None:
        (programs / "nvidia-smi").write_text(SMI.format(driver=driver))
    for program in programs.iterdir():
        program.chmod(0o755)
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "UV_", "PIP_"))}
    env, command = clean | {"PATH": f"{programs}:{os.environ['PATH']}"}, ["make", "setup", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    if extra is None:
        line, *_ = done.stderr.splitlines()
        assert line.startswith(f"NVIDIA driver {driver} is too old for CUDA 13: install 580 or newer")
        assert (done.returncode, "setting up" in done.stdout) == (2, False)
        assert not (tmp_path / "asked").exists() and not (tmp_path / ".venv").exists()
    else:
        assert done.returncode == 0, done.stderr
        assert f"-e .[{extra}" in (tmp_path / "asked").read_text()
