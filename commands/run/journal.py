"""Keeps the open rollouts of a run in a file, so that the next run can fail them if this one is killed."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ...store.sqlite.file import make_private
from ..api_client import ApiClient, ApiError

KILLED = "its `run` was killed"
GONE, CONFLICT = 404, 409


def directory() -> Path:
    """Return where the journals of this user's runs are."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lightning-proxy" / "runs"


class Journal:
    """The file is locked while its run lives, and removed at its end. Without a place for it, there is none."""

    def __init__(self, url: str) -> None:
        """`url`: of the proxy that has the rollouts."""
        self._path = directory() / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._file: TextIO | None = None
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            make_private(self._path)
            self._file = self._path.open("a", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write([url])

    def opened(self, rollout_ids: Iterable[str]) -> None:
        self._write(f"+{rollout_id}" for rollout_id in rollout_ids)

    def ended(self, rollout_id: str) -> None:
        self._write([f"-{rollout_id}"])

    def close(self, *, keep: bool) -> None:
        """Remove the file, or `keep` it: rollouts could not be ended."""
        if self._file is not None:
            if not keep:
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
            if url == api.url:
                ended = {line[1:] for line in lines if line.startswith("-")}
                left = [line[1:] for line in lines if line.startswith("+") and line[1:] not in ended]
                count += sum([await _failed(api, rollout_id) for rollout_id in left])
                path.unlink()
    return count


async def _failed(api: ApiClient, rollout_id: str) -> bool:
    try:
        await api.end_rollout(rollout_id, "failed", KILLED)
    except ApiError as error:
        if error.status_code not in (GONE, CONFLICT):
            raise
        return False
    return True
