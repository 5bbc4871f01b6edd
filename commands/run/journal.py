"""Keeps the open rollouts of a run in a file, so that the next run can fail them if this one is killed."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ...store.sqlite.file import make_private
from ..api_client import ApiClient, ApiError
from .limits import Json, Observer

KILLED = "its `run` was killed"
GONE, CONFLICT = 404, 409


def directory() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lightning-proxy" / "runs"


class Journal(Observer):
    """The file is locked while its run lives, and removed once none is open. Without a place for it, there is none."""

    def __init__(self, url: str) -> None:
        """`url`: of the proxy that has the rollouts."""
        self._path = directory() / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._file: TextIO | None = None
        self.open: set[str] = set()
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            make_private(self._path)
            self._file = self._path.open("a", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write([url])

    def opened(self, rollout_ids: Sequence[str], sibling_of: str | None) -> None:
        self.open.update(rollout_ids)
        self._write(f"+{rollout_id}" for rollout_id in rollout_ids)

    def ended(self, rollout: Json) -> None:
        self.open.remove(rollout["rollout_id"])
        self._write([f"-{rollout['rollout_id']}"])

    def close(self) -> None:
        if self._file is not None:
            if not self.open:
                self._path.unlink(missing_ok=True)
            self._file.close()

    def _write(self, lines: Iterable[str]) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.write("".join(f"{line}\n" for line in lines))
                self._file.flush()


async def fail_left(api: ApiClient) -> int:
    """End the rollouts that killed runs left open at this proxy as failed, and return how many there were."""
    count = 0
    for path in sorted(directory().glob("*")):
        with suppress(OSError), path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its run lives
            url, *lines = file.read().splitlines() or [""]
            if url != api.url:
                continue
            ended = {line[1:] for line in lines if line.startswith("-")}
            for rollout_id in (line[1:] for line in lines if line.startswith("+") and line[1:] not in ended):
                try:
                    await api.end_rollout(rollout_id, "failed", KILLED)
                    count += 1
                except ApiError as error:
                    if error.status_code not in (GONE, CONFLICT):
                        raise
            path.unlink()
    return count
