"""A worker of `serve` that no longer answers signals, for a supervisor of a test's own."""

from __future__ import annotations

import signal

from lightning_proxy.commands import serve


def hang() -> None:
    """Watch the supervisor as a worker does, and ignore what would end it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve.ORPHAN_S = 0.2
    serve._end_with_parent()
