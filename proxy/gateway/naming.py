"""Determines the rollout of a request, by header, URL or key. Contract, section 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast
from uuid import uuid4

from ..errors import InvalidRequest
from ..types import Mode, RolloutName, check_id


class DataPath(NamedTuple):
    """A path of the data API, percent-decoded: `rest` begins with /v1/; the ids are those of the URL, unchecked."""

    rest: str
    rollout_id: str | None = None
    task_id: str | None = None
    agent: str | None = None


def parse_path(path: str) -> DataPath | None:
    """Split /rollouts/{rollout_id}[/tasks/{task_id}][/agents/{agent}]/v1/…, or /v1/…; None for any other path."""
    if path.startswith("/v1/"):
        return DataPath(path)
    if not path.startswith("/rollouts/"):
        return None
    rollout_id, _, rest = path.removeprefix("/rollouts/").partition("/")
    task_id = agent = None
    if rest.startswith("tasks/"):
        task_id, _, rest = rest.removeprefix("tasks/").partition("/")
    if rest.startswith("agents/"):
        agent, _, rest = rest.removeprefix("agents/").partition("/")
    return DataPath(f"/{rest}", rollout_id, task_id, agent) if rest.startswith("v1/") else None


def name_rollout(path: DataPath, headers: Mapping[str, str], key_rollout_id: str | None = None) -> RolloutName:
    """Return the rollout named by header, URL or key, in this order; else a new one, which is not `named`.

    `headers` has lower-case names. Raises InvalidRequest for an id or a mode that is not valid.
    """
    if "x-rollout-id" in headers:
        rollout_id = check_id(headers["x-rollout-id"], "X-Rollout-Id")
        path = DataPath(path.rest)
    elif path.rollout_id is not None:
        rollout_id = check_id(path.rollout_id, "rollout_id")
    else:
        rollout_id = key_rollout_id or uuid4().hex
    named = key_rollout_id is not None or "x-rollout-id" in headers or path.rollout_id is not None
    task_id = _first_id((path.task_id, "task_id"), (headers.get("x-task-id"), "X-Task-Id"))
    agent = _first_id((path.agent, "agent"), (headers.get("x-agent-name"), "X-Agent-Name"))
    return RolloutName(rollout_id, task_id, agent, _mode(headers.get("x-rollout-mode")), named)


def _first_id(*candidates: tuple[str | None, str]) -> str | None:
    for value, what in candidates:
        if value is not None:
            return check_id(value, what)
    return None


def _mode(value: str | None) -> Mode:
    if value not in (None, "train", "eval"):
        raise InvalidRequest(f"X-Rollout-Mode must be train or eval, got {value[:60]!r}", param="X-Rollout-Mode")
    return cast(Mode, value or "train")


def wants_recording(headers: Mapping[str, str]) -> bool:
    """Return False if X-Recording is `off`; raise InvalidRequest if it is neither on nor off."""
    value = headers.get("x-recording", "on").lower()
    if value not in ("on", "off"):
        raise InvalidRequest(f"X-Recording must be on or off, got {value[:60]!r}", param="X-Recording")
    return value == "on"
