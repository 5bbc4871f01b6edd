"""Reads task files in JSON Lines or Parquet. The `task_id` of a line or row, or else its hash, names the group."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError, InvalidRequest
from ...core.records import check_id
from ..files import lines


@dataclass(frozen=True, slots=True)
class Task:
    """One line or row of a task file, as JSON. The agent program sees it in LIGHTNING_TASK.

    `siblings`: rollouts of its group that an earlier run opened.
    """

    task_id: str
    line: str
    siblings: tuple[str, ...] = ()


def read_tasks(path: Path) -> list[Task]:
    """Read all tasks of a file, skipping empty lines. Raises ConfigError with the file, the line and the problem."""
    tasks = [_task(line, f"{path}:{number}") for number, line in lines(path)]
    if not tasks:
        raise ConfigError(f"{path} has no tasks")
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: a task must be a JSON object, got {type(data).__name__}")
        task_id = data.get("task_id")
        if task_id is None:
            canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
            return Task(hashlib.sha256(canonical.encode()).hexdigest()[:16], line)
        if isinstance(task_id, bool) or not isinstance(task_id, str | int):
            raise ConfigError(f"{where}: task_id must be a string or an integer, got {type(task_id).__name__}")
        return Task(check_id(str(task_id), "task_id"), line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
