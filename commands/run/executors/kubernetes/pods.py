"""Reads the state of a program from the status of its pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...runner import CANNOT_START

KILLED = 137  # SIGKILL, as containers report it
# The kubelet's reasons for a container that cannot start. Some go away by themselves.
CANNOT_BE_MADE = {
    "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull", "ImageInspectError",
    "ImagePullBackOff", "InvalidImageName", "RegistryUnavailable", "RunContainerError",
}  # fmt: skip
CANNOT_BE_RUN = {"ContainerCannotRun", "StartError"}  # no such program, as a rule
TOO_LONG = "DeadlineExceeded"  # activeDeadlineSeconds of the template: the program's own fault


@dataclass(frozen=True, slots=True)
class PodState:
    """`waiting` and `refused` may become `running`; then comes `ended`, with an exit code, or `lost`.

    `refused`: the container cannot be started as things are. `message`: Kubernetes' own words about it.
    """

    phase: Literal["waiting", "refused", "running", "ended", "lost"]
    pod: str
    message: str = ""
    code: int | None = None


def state_of(pod: Mapping[str, Any], *, deleted: bool = False) -> PodState:
    """Return the state of the pod's first container. `deleted`: the pod is gone, and this was its last state."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    container = _first(pod, status)
    state = container.get("state") or {}
    gone = _disruption(status)
    if (ended := state.get("terminated")) is not None:
        if gone and ended.get("exitCode") != 0:
            return PodState("lost", name, gone)
        return _ended(name, ended)
    if status.get("phase") == "Failed" and status.get("reason") == TOO_LONG:
        return PodState("ended", name, _message(status), KILLED)
    if not gone and (failed := _failed_before(status)) is not None:
        return PodState(
            "ended", name, f"init container {failed['name']} failed", failed["state"]["terminated"]["exitCode"]
        )
    if gone or deleted or status.get("phase") == "Failed":  # Failed without a container's end: the kubelet refused it
        return PodState("lost", name, gone or _message(status) or "the pod was deleted")
    if "running" in state:
        return PodState("running", name)
    waiting = state.get("waiting") or {}
    if waiting.get("reason") in CANNOT_BE_MADE:
        return PodState("refused", name, _message(waiting))
    return PodState("waiting", name, _unscheduled(status) or _message(waiting))


def _first(pod: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the agent's container. A template may have others beside it."""
    wanted = pod["spec"]["containers"][0]["name"]
    return next((one for one in status.get("containerStatuses") or () if one["name"] == wanted), {})


def _failed_before(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The init container that failed, where that was the pod's end."""
    for one in (status.get("initContainerStatuses") or ()) if status.get("phase") == "Failed" else ():
        if (one.get("state", {}).get("terminated") or {}).get("exitCode"):
            return one
    return None


def _ended(name: str, ended: Mapping[str, Any]) -> PodState:
    if ended.get("reason") in CANNOT_BE_RUN:
        return PodState("ended", name, _message(ended), CANNOT_START)
    message = _message(ended) if ended.get("reason") not in ("Completed", "Error", None) else ""
    return PodState("ended", name, message, ended["exitCode"])


def _disruption(status: Mapping[str, Any]) -> str:
    """Why Kubernetes itself ended the pod: its node went away or was drained, or another pod took its place."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return _message(condition)
    return ""


def _unscheduled(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _message(condition)
    return ""


def _message(entry: Mapping[str, Any]) -> str:
    """Reason and message, as far as they are there."""
    return ": ".join(part for part in (entry.get("reason"), entry.get("message")) if part)
