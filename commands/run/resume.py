"""`--resume FILE`: keeps results, so that the same command asks for no rollout again that has its reward."""

from __future__ import annotations

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from ...proxy.errors import ConfigError
from ..api_client import ApiClient, ApiError
from .run import RolloutResult, result_of
from .tasks import Task

NOT_FOUND = 404
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
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"--resume: {path} is no file of results") from None
        yield kept


class KeptResults:
    """The results of the runs that had this file: those with a reward, and those that await one."""

    def __init__(self, file: TextIO) -> None:
        """Raise ValueError, TypeError or KeyError if a line is neither a result nor a rollout that was opened."""
        self._file = file
        file.seek(0)
        *lines, cut_off = file.read().split("\n")
        if not BEGINS.startswith(cut_off[: len(BEGINS)]):
            raise ValueError(cut_off)
        found = {one["rollout_id"]: one for one in map(json.loads, lines)}
        self._opened = [name for name, one in found.items() if len(one) == 1]  # without a result so far
        self.results = [RolloutResult(**one) for one in found.values() if len(one) > 1]
        file.truncate(sum(len(line.encode()) + 1 for line in lines))

    async def look(self, api: ApiClient) -> None:
        """Add what had no reward yet when its run ended, or was killed, if it has or awaits one now."""
        for name in self._opened:
            try:
                rollout = await api.rollout(name)
            except ApiError as error:
                if error.status_code != NOT_FOUND:
                    raise
                continue
            rewarded = rollout["reward"] is not None or rollout.get("awaits_reward")
            if rewarded and rollout["status"] not in ("failed", "discarded"):
                self.results.append(result_of(name, rollout["task_id"], rollout))

    def opened(self, rollout_ids: Sequence[str]) -> None:
        """Keep the rollouts that may have their reward only when their run has ended."""
        self._write({"rollout_id": name} for name in rollout_ids)

    def add(self, result: RolloutResult) -> None:
        """Keep a result. One without a reward is looked at again."""
        if result.reward is not None:
            self._write([{**asdict(result), "answers": {}}])

    def _write(self, kept: Iterable[dict[str, object]]) -> None:
        self._file.write("".join(json.dumps(one) + "\n" for one in kept))
        self._file.flush()

    def left(self, tasks: Sequence[Task], group_size: int) -> list[Task]:
        """Return the tasks that have fewer siblings with a result; each names those that it has."""
        kept = defaultdict[str, list[str]](list)
        for result in self.results:
            kept[result.task_id].append(result.rollout_id)
        left = []
        for task in tasks:
            own, kept[task.task_id] = kept[task.task_id][:group_size], kept[task.task_id][group_size:]
            left += [replace(task, siblings=tuple(own))] if len(own) < group_size else []
        return left
