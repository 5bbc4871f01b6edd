"""The control API against its own OpenAPI document: what schemathesis makes of it, sent to a running proxy.

Half a minute; `LIGHTNING_FUZZ_SECONDS=600` for longer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest

SECONDS = int(os.environ.get("LIGHTNING_FUZZ_SECONDS", "30"))
RUN = [str(Path(sys.executable).parent / "schemathesis"), "run"]
# An event opens the rollout that it names, so also one that was deleted: the check takes what it finds then for the
# deleted one.
# A prompt that was just made has no version 5149395: the second check takes that 404 for the prompt's.
# Whether a sibling has the task that was named depends on what is stored: the third takes that 422 for the schema's.
UNSOUND = "use_after_free,ensure_resource_availability,positive_data_acceptance"


@pytest.mark.timeout(SECONDS + 120)
async def test_no_request_is_answered_with_500_or_otherwise_than_documented(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path, publish="lora") as system:
        await system.chat("r1", X_Task_Id="t")
        await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 1})
        options = ["--max-time", str(SECONDS), "--checks", "all", "--exclude-checks", UNSOUND, "--no-color"]
        command = [*RUN, f"{system.url}/openapi.json", *options]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT, cwd=tmp_path)
        out, _ = await process.communicate()
        print(out.decode())
        assert process.returncode == 0, out.decode()[-8000:]
        assert (await system.call("GET", "/readyz"))[0] == 200
