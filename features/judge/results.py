"""Keeps the function's rewards of each rollout as lines of a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from ...core.errors import ConfigError
from ...core.json_text import dumps_readable


@dataclass(frozen=True, slots=True)
class RescoredRollout:
    """A rollout: its rewards `before` and the new `values`, by name; or the `error` that the function ended with."""

    rollout_id: str
    task_id: str | None
    before: dict[str, float]
    values: dict[str, float]
    source: str
    error: str | None


class ResultFile:
    """`with ResultFile(path) as results:` appends a line for each rollout at once; without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> ResultFile:
        if self._path is not None:
            try:
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, scored: RescoredRollout) -> None:
        if self._file is not None:
            self._file.write(dumps_readable(asdict(scored)) + "\n")
            self._file.flush()


def failed_in(path: Path) -> set[str]:
    """Return the rollouts whose last line in a results file has an error. Raise ConfigError if it is no such file."""
    errors: dict[str, str | None] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            errors[found["rollout_id"]] = found["error"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # cut off when the command was killed
                continue
            raise ConfigError(f"{path}:{number}: no line of `rescore --out`") from None
    return {rollout_id for rollout_id, error in errors.items() if error is not None}
