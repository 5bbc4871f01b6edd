"""Task files in JSON Lines or Parquet. The `task_id` of a line or row, or else its hash, names the group."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError, InvalidRequest
from ...core.records import check_id


@dataclass(frozen=True, slots=True)
class Task:
    """One line of a task file. The agent program sees it in LIGHTNING_TASK.

    `siblings`: rollouts of its group that an earlier run has ended.
    """

    task_id: str
    line: str
    siblings: tuple[str, ...] = ()


def read_tasks(path: Path) -> list[Task]:
    """Read all tasks of a file, without its empty lines. A ConfigError names file, line and fault."""
    lines = _rows(path) if path.suffix == ".parquet" else _lines(path)
    if not lines:
        raise ConfigError(f"{path} holds no task")
    return [_task(line, f"{path}:{number}") for number, line in lines]


def _rows(path: Path) -> list[tuple[int, str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install 'lightning-proxy[parquet]'") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return [(number, json.dumps(row, ensure_ascii=False, default=str)) for number, row in enumerate(rows, start=1)]


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    # Not splitlines(), which would split at U+2028 inside JSON strings.
    return [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _task(line: str, where: str) -> Task:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a task is a JSON object, got {type(data).__name__}")
    task_id = data.get("task_id")
    if task_id is None:
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return Task(hashlib.sha256(canonical.encode()).hexdigest()[:16], line)
    if isinstance(task_id, bool) or not isinstance(task_id, str | int):
        raise ConfigError(f"{where}: task_id must be a string, got {type(task_id).__name__}")
    try:
        return Task(check_id(str(task_id), "task_id"), line)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
