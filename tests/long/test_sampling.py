"""A real vLLM in float32 samples in every way, and the trainer's ratios to it are 1."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_ratios_are_1_with_unchanged_weights_however_vllm_samples(tmp_path: Path) -> None:
    from support.models import save_spelling_model  # imports torch

    model = await asyncio.to_thread(save_spelling_model, tmp_path / "speller")
    command = [ROOT / "benchmarks" / "sampling.py", "--model", model, "--answers", "3", "--tokens", "32"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, out.decode() + err.decode()[-2000:]
    assert out.count(b"\n| ") >= 24
