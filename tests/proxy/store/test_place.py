"""A store whose file is removed, moved or replaced while the proxy serves: what has no place is not acknowledged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

REWARD = {"rollout_id": "before", "reward": 1.0, "final": False}
pytestmark = pytest.mark.sqlite


@pytest.mark.parametrize("how", ["removed", "all removed", "moved", "replaced", "log removed"])
async def test_nothing_is_acknowledged_that_no_file_will_have(
    running: Any, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, away = tmp_path / "store.db", tmp_path / "away.db"
    async with running(tmp_path) as system:
        assert (await system.chat("before"))[0] == 200
        match how:
            case "removed":
                file.unlink()
            case "all removed":
                for one in tmp_path.glob("store.db*"):
                    one.unlink()
            case "moved":
                file.rename(away)
            case "replaced":
                away.write_bytes(file.read_bytes())
                away.replace(file)
            case "log removed":
                (tmp_path / "store.db-wal").unlink()
        for rollout in ("before", "after"):
            status, answer = await system.chat(rollout)
            assert status == 503 and "was removed or replaced" in answer["error"]["message"]
        assert (await system.call("POST", "/reward", REWARD))[0] == 503
        status, answer = await system.call("GET", "/readyz")
        assert status == 503 and "was removed or replaced" in answer["store"]
        assert caplog.text.count("records cannot be written") == 1
        if how == "moved":
            away.rename(file)
            assert (await system.chat("again"))[0] == 200, "it has its place again"
            assert caplog.text.count("records can be written again") == 1
