"""What a pod's status says about its program."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.commands.run.executors.kubernetes.pods import state_of
from lightning_proxy.commands.run.runner import CANNOT_START

DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}


def pod(phase: str, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [{"name": "sidecar", "state": {"running": {}}}]
    containers += [{"name": "agent", "state": state}] if state is not None else []
    return {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "agent"}, {"name": "sidecar"}]},
        "status": {"phase": phase, "containerStatuses": containers} | status,
    }


def ended(code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, **more}}


@pytest.mark.parametrize(
    ("status", "phase", "code", "said"),
    [
        (pod("Pending"), "waiting", None, ""),
        (pod("Pending", {"waiting": {"reason": "ContainerCreating"}}), "waiting", None, "ContainerCreating"),
        (pod("Pending", {"waiting": {"reason": "ErrImagePull", "message": "m"}}), "refused", None, "ErrImagePull: m"),
        (pod("Running", {"running": {}}), "running", None, ""),
        (pod("Running", ended(0, "Completed")), "ended", 0, ""),  # the sidecar runs on
        (pod("Failed", ended(3)), "ended", 3, ""),
        (pod("Failed", ended(137, "OOMKilled")), "ended", 137, "OOMKilled"),
        (pod("Failed", ended(128, "StartError", message="m")), "ended", CANNOT_START, "StartError: m"),
        (pod("Failed", reason="DeadlineExceeded"), "ended", 137, "DeadlineExceeded"),
        (pod("Failed", ended(143), conditions=[DISRUPTED]), "lost", None, "PreemptionByScheduler"),
        (pod("Succeeded", ended(0), conditions=[DISRUPTED]), "ended", 0, ""),
        (pod("Running", {"running": {}}, conditions=[DISRUPTED]), "lost", None, "PreemptionByScheduler"),
        (pod("Failed", reason="OutOfcpu", message="m"), "lost", None, "OutOfcpu: m"),
        (
            pod("Failed", {"waiting": {}}, initContainerStatuses=[{"name": "i", "state": ended(4)}]),
            "ended", 4, "init container i failed",
        ),
    ],
)  # fmt: skip
def test_a_pod_says_how_its_program_does(status: dict[str, Any], phase: str, code: int | None, said: str) -> None:
    state = state_of(status)
    assert (state.phase, state.code, state.message) == (phase, code, said)


def test_a_pod_that_is_gone_is_lost_unless_its_program_had_ended() -> None:
    assert state_of(pod("Running", {"running": {}}), deleted=True).phase == "lost"
    assert state_of(pod("Failed", ended(3)), deleted=True).code == 3
