"""`policy list` and `status` show the evidence of a test as it grows, and how it was decided."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.promotion import gate

Running = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_S", 0.05)


async def told(system: Any, *command: str) -> str:
    """What a command says, on one line."""
    return " ".join((await system.lightning(*command)).stdout.split())


async def test_a_test_is_shown_while_it_is_under_way_and_after_it(running: Running, tmp_path: Path) -> None:
    policy, trainer = {"promotion": "gated"}, {"group_size": 2}
    async with running(tmp_path, publish="lora", policy=policy, trainer=trainer) as system:
        assert "test" not in await told(system, "policy", "list")
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        _, before = await system.call("GET", "/policy")
        assert (before["promotion"], before["test"]["version"]) == ("gated", version)
        listed = await told(system, "policy", "list")
        assert "candidate" in listed
        assert f"testing version {version} against 0: " in listed
        for i in range(4):
            await system.chat(f"r{i}", X_Task_Id=f"t{i // 2}")
            await system.call("POST", "/reward", {"rollout_id": f"r{i}", "reward": 0.5})
        evidence: dict[str, Any] = {}
        while evidence.get("groups") != 2:
            evidence = (await system.call("GET", "/policy"))[1]["test"]["evidence"]
        assert evidence["metrics"]["reward"]["difference"] == 0.0
        listed = await told(system, "policy", "list")
        assert "4 of at most 2,000 rollouts; reward +0.00 (2 pairs, undecided)" in listed
        shown = await told(system, "status")
        assert f"testing version {version} against 0: 4 of at most 2,000 rollouts" in shown
        assert (await system.call("POST", "/policy/rollback"))[0] == 409
        assert (await system.call("POST", "/policy/promote", {"version": 0}))[0] == 200
        listed = await told(system, "policy", "list")
        assert f"the test of version {version} against 0 was ended: version 0 was made live during the test" in listed
        answer = json.loads((await system.lightning("policy", "list", "--json")).stdout)
        assert answer["data"][version]["promotion"]["evidence"] == evidence, "its numbers are kept"
