"""`--resume FILE`: keeps results, so that the same command asks for no rollout again that has its reward."""

from __future__ import annotations

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import TextIO

from ...core.errors import ConfigError
from ..api_client import ApiClient, ApiError
from .limits import Observer
from .run import RolloutResult, result_of
from .tasks import Task

BEGINS = '{"rollout_id": '  # each line, the last too, if its run was killed
GONE = 404


@contextmanager
def kept_results(path: Path | None) -> Iterator[KeptResults]:
    """Open the file for one run at a time; None: keep nothing. ConfigError if it cannot be used."""
    if path is None:
        yield KeptResults(StringIO())
        return
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


class KeptResults(Observer):
    """The results of the runs that had this file: those with a reward, and those that await one.

    `usd`: what the rollouts of earlier runs have cost.
    """

    def __init__(self, file: TextIO) -> None:
        """Raise ValueError, TypeError or KeyError if a line is neither a result nor a rollout that was opened."""
        self._file = file
        file.seek(0)
        *lines, cut_off = file.read().split("\n")
        if not BEGINS.startswith(cut_off[: len(BEGINS)]):
            raise ValueError(cut_off)
        self._groups: dict[str, str] = {}  # the first rollout of each one's
        results: dict[str, RolloutResult | None] = {}
        for line in map(json.loads, lines):
            name = line["rollout_id"]
            self._groups[name] = line.pop("group", name)
            results[name] = RolloutResult(**line) if len(line) > 1 else None
        self._opened = [name for name, result in results.items() if result is None]
        self.results = [result for result in results.values() if result is not None]
        self.usd = sum(result.usd for result in self.results)
        file.truncate(sum(len(line.encode()) + 1 for line in lines))

    async def look(self, api: ApiClient) -> int:
        """Add what was rewarded, or awaits it, since its run ended or was killed.

        Fail what still runs without a reward, since a sibling takes its place. Return how many these are.
        """
        failed = 0
        for name in self._opened:
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
                await api.end_rollout(name, "failed", "`run --resume` began it anew")
                failed += 1
        return failed

    def opened(self, rollout_ids: Sequence[str], sibling_of: str | None) -> None:
        """Keep the rollouts, which may have their reward only when their run has ended."""
        group = rollout_ids[0] if sibling_of is None else self._groups[sibling_of]
        self._groups |= dict.fromkeys(rollout_ids, group)
        self._write({"rollout_id": name, "group": group} for name in rollout_ids)

    def add(self, result: RolloutResult) -> None:
        """Keep a result. One without a reward is looked at again."""
        self.results.append(result)
        if result.reward is not None:
            self._write([{**asdict(result), "answers": {}, "group": self._groups[result.rollout_id]}])

    def _write(self, kept: Iterable[dict[str, object]]) -> None:
        self._file.write("".join(json.dumps(one) + "\n" for one in kept))
        self._file.flush()

    def left(self, tasks: Sequence[Task], group_size: int) -> list[Task]:
        """Return the tasks whose groups have fewer siblings with a result; each names those that it has.

        Results of other tasks are forgotten.
        """
        known = {task.task_id for task in tasks}
        self.results = [result for result in self.results if result.task_id in known]
        groups = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
        for result in self.results:
            groups[result.task_id][self._groups[result.rollout_id]].append(result.rollout_id)
        begun = {name: iter(of_task.values()) for name, of_task in groups.items()}
        joined = [replace(task, siblings=tuple(next(begun.get(task.task_id, iter(())), ()))) for task in tasks]
        return [task for task in joined if len(task.siblings) < group_size]
