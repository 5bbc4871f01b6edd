"""`--resume FILE`: keeps a list of opened rollouts, so that rollouts with a reward are not run again."""

from __future__ import annotations

import fcntl
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TextIO

from ...core.errors import ConfigError
from ..api_client import ApiClient, ApiError
from .limits import Observer
from .run import RolloutResult, result_of
from .tasks import Task

LINE = re.compile(r"rollout (\S+) of the group of (\S+)")
GONE = 404


@contextmanager
def opened_rollouts(path: Path | None) -> Iterator[OpenedRollouts]:
    """Open and lock the file of `run --resume`, if a path is given. Raise ConfigError if it cannot be used."""
    if path is None:
        yield OpenedRollouts(StringIO())
        return
    try:
        file = path.open("a+", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"--resume: cannot use {path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened = OpenedRollouts(file)
        except BlockingIOError:
            raise ConfigError(f"--resume: another run is using {path}") from None
        except ValueError:
            raise ConfigError(f"--resume: {path} is not a file that `run --resume` wrote") from None
        yield opened


class OpenedRollouts(Observer):
    """The file of `run --resume`. Each rollout has a line with its id and the id of its group's first rollout.

    `results` are those of rollouts that have or await a reward, and neither failed nor were discarded. `usd` is the
    cost of all rollouts of earlier runs.
    """

    def __init__(self, file: TextIO) -> None:
        """Read the file. Raise ValueError if a line names no rollout, except for a last line that was cut off."""
        self._file = file
        file.seek(0)
        *lines, cut_off = file.read().split("\n")
        found = [LINE.fullmatch(line) for line in lines]
        if None in found or not "rollout ".startswith(cut_off[:8]):
            raise ValueError
        file.truncate(sum(len(line) + 1 for line in lines))
        self._groups = {line[1]: line[2] for line in found if line}
        self.results: list[RolloutResult] = []
        self.usd = 0.0

    async def look(self, api: ApiClient) -> int:
        """Read `results` and `usd` from the proxy.

        End as failed the rollouts that are still running and neither have nor await a reward, since new siblings
        replace them. Return how many these were.
        """
        failed = 0
        for name in self._groups:
            try:
                rollout = await api.rollout(name)
            except ApiError as error:
                if error.status_code != GONE:
                    raise
                continue
            result = result_of(rollout)
            self.usd += result.usd
            if result.reward is not None or rollout.get("awaits_reward"):
                if rollout["status"] not in ("failed", "discarded"):
                    self.results.append(result)
            elif rollout["status"] == "running":
                await api.end_rollout(name, "failed", "`run --resume` began it again")
                failed += 1
        return failed

    def opened(self, rollout_ids: Sequence[str], sibling_of: str | None) -> None:
        group = rollout_ids[0] if sibling_of is None else self._groups[sibling_of]
        self._groups |= dict.fromkeys(rollout_ids, group)
        self._file.write("".join(f"rollout {name} of the group of {group}\n" for name in rollout_ids))
        self._file.flush()

    def left(self, tasks: Sequence[Task], group_size: int) -> list[Task]:
        """Return the tasks that have too few siblings with a result, each with the siblings that it has.

        Results of tasks that are not in `tasks` are dropped.
        """
        known = {task.task_id for task in tasks}
        self.results = [result for result in self.results if result.task_id in known]
        groups = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
        for result in self.results:
            groups[result.task_id][self._groups[result.rollout_id]].append(result.rollout_id)
        begun = {name: iter(of_task.values()) for name, of_task in groups.items()}
        joined = [replace(task, siblings=tuple(next(begun.get(task.task_id, iter(())), ()))) for task in tasks]
        return [task for task in joined if len(task.siblings) < group_size]
