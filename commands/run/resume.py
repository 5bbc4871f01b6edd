"""`--resume FILE`: keeps results, so that the same command asks for no rollout again that has its reward."""

from __future__ import annotations

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from ...proxy.errors import ConfigError
from .run import RolloutResult
from .tasks import Task

BEGINS = '{"rollout_id": '  # each line, the last too, if its run was killed


@contextmanager
def kept_results(path: Path) -> Iterator[KeptResults]:
    """Open the file for one run at a time. ConfigError if it cannot be used."""
    try:
        file = path.open("a+", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"--resume: cannot use {path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = KeptResults(file)
        except BlockingIOError:
            raise ConfigError(f"--resume: another run has {path}") from None
        except (ValueError, TypeError):
            raise ConfigError(f"--resume: {path} is no file of results") from None
        yield kept


class KeptResults:
    """The results with a reward of the runs that had this file."""

    def __init__(self, file: TextIO) -> None:
        """Raise ValueError or TypeError if a line is no result."""
        self._file = file
        file.seek(0)
        *lines, cut_off = file.read().split("\n")
        if not BEGINS.startswith(cut_off[: len(BEGINS)]):
            raise ValueError(cut_off)
        self.results = [RolloutResult(**json.loads(line)) for line in lines]
        file.truncate(sum(len(line.encode()) + 1 for line in lines))

    def add(self, result: RolloutResult) -> None:
        """Keep a result. One without a reward is asked for again."""
        if result.reward is not None:
            self._file.write(json.dumps({**asdict(result), "answers": {}}) + "\n")
            self._file.flush()

    def left(self, tasks: Sequence[Task], group_size: int) -> list[Task]:
        """Return the tasks that have fewer siblings with a reward; each names those that it has."""
        kept = defaultdict[str, list[str]](list)
        for result in self.results:
            kept[result.task_id].append(result.rollout_id)
        left = []
        for task in tasks:
            own, kept[task.task_id] = kept[task.task_id][:group_size], kept[task.task_id][group_size:]
            left += [replace(task, siblings=tuple(own))] if len(own) < group_size else []
        return left
