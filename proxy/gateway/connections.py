"""Shares out a server's open files: connections without a request get a part, the rest is for calls.

Each connection holds a file, and a call another one to its upstream. Where a system allows few, connections that send
nothing would use them up, and calls would fail that have a key.
"""

from __future__ import annotations

import logging
import resource
from time import monotonic
from typing import Protocol

log = logging.getLogger(__name__)

OWN_FILES = 64  # of the process: store, log, threads' pipes, connections of our own to model servers
FILES_OF_A_CALL = 2
LEAST_SILENT = 1 / 16  # of the files are for connections whose head is to come
MOST_SILENT = 2048  # connections without a request; each takes memory, too
PROBES = 8  # requests for the proxy's health that find a place beside all calls
MOST_FILES = 2**20  # where the system has no limit
LOG_EVERY_S = 60.0


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft not in (hard, resource.RLIM_INFINITY) and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            log.warning("open files stay limited to %d: %s", soft, error)


def files_allowed() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)


def calls_at_once(files: int) -> int:
    """Return how many calls can be under way at once where so many files may be open."""
    return max(int((files - OWN_FILES) * (1 - LEAST_SILENT)) // FILES_OF_A_CALL, 1)


class Silent(Protocol):
    """A connection that can be closed while it has no request under way."""

    def close_silent(self) -> None:
        """Close the connection."""

    @property
    def is_idle_without_key(self) -> bool:
        """Return whether its request had no key, and its answer is not read or takes long."""

    def abort(self) -> None:
        """Close the connection at once, also in the middle of an answer."""


class Connections:
    """Knows what a server's connections are doing, and closes silent ones when they are many: the oldest first.

    Those that never sent a request go first. Where all places are taken, those without a key go.
    """

    def __init__(self, files: int) -> None:
        self._calls, self._room = calls_at_once(files), files - OWN_FILES
        self._most_silent = min(self._room // 4, MOST_SILENT)
        self._new: dict[Silent, None] = {}  # in the order in which they came
        self._idle: dict[Silent, None] = {}
        self._at_work: dict[Silent, None] = {}
        self._closed, self._logged_at = 0, -LOG_EVERY_S
        self.untaken = 0  # bytes of answers without a key that their clients do not take

    def opened(self, connection: Silent) -> None:
        """Note a connection that has not sent a request yet."""
        self._new[connection] = None
        self._close_silent()

    def began(self, connection: Silent, *, is_probe: bool = False) -> bool:
        """Note that a request's head has come. False if there is no place for another call."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        most = self._calls + (PROBES if is_probe else 0)
        if connection not in self._at_work and len(self._at_work) >= most and not self._abort_idle():
            return False
        self._at_work[connection] = None
        self._close_silent()
        return True

    def ended(self, connection: Silent) -> None:
        """Note that a request was answered; the connection may bring another one."""
        self._at_work.pop(connection, None)
        self._idle[connection] = None
        self._close_silent()

    def lost(self, connection: Silent) -> None:
        """Forget a connection."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        self._at_work.pop(connection, None)

    def _abort_idle(self) -> bool:
        idle = next((one for one in self._at_work if one.is_idle_without_key), None)
        if idle is not None:
            self.lost(idle)
            idle.abort()
        return idle is not None

    def _close_silent(self) -> None:
        allowed = max(min(self._most_silent, self._room - FILES_OF_A_CALL * len(self._at_work)), 1)
        while (silent := len(self._new) + len(self._idle)) > allowed and silent:
            oldest = next(iter(self._new or self._idle))
            self.lost(oldest)
            oldest.close_silent()
            self._closed += 1
        if self._closed and monotonic() > self._logged_at + LOG_EVERY_S:
            log.warning("closed %d silent connections: %d may be open now", self._closed, allowed)
            self._closed, self._logged_at = 0, monotonic()
