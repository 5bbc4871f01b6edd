"""Two trainer processes under a launcher train from the store and publish."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from support.paths import EXAMPLES
from support.training import (
    bench,
)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_two_processes_train_from_the_store_and_publish_until_the_launcher_ends(
    base: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with bench(base, tmp_path) as b:
        rollouts = await b.groups("t1", "t2")
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(b.config.model_dump(mode="json", exclude_unset=True)))
        launcher = EXAMPLES / "distributed" / "cpu.yaml"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", launcher),
            *("-m", "lightning_proxy.cli", "--config", config, "train"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        while not (await b.store.versions.live()).verified or (await b.store.versions.live()).version < 1:
            assert process.returncode is None, (await process.communicate())[0].decode()
            await asyncio.sleep(0.2)
        trainers = psutil.Process(process.pid).children(recursive=True)
        assert len(trainers) == 2
        process.send_signal(number)
        output = (await process.communicate())[0].decode()
        assert "RankLost" not in output and not psutil.wait_procs(trainers, timeout=10)[1]
        assert output.count("step 1  reward") == 1, "only one of them reports"
        assert await b.steps_of(rollouts) == {1}
        assert (await b.store.versions.live()).publish == "merged"
