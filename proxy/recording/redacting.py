"""The recorder behind a redactor: nothing that it finds is ever stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..gateway.ports import Recorder, Statement
from ..types import CallEnd, CallStart
from .redact import Redactor


class RedactingRecorder:
    """Redacts before anything is compared or stored: an earlier call is found again by what is kept of it.

    `on_redacted` hears of every call that can't be trained on because of it.
    """

    def __init__(self, recorder: Recorder, redactor: Redactor, on_redacted: Callable[[], None] = lambda: None) -> None:
        self._recorder = recorder
        self._redactor = redactor
        self._on_redacted = on_redacted
        self._shown: set[str] = set()

    async def start(self, start: CallStart, also: Sequence[Statement] = ()) -> None:
        redacted, shown = self._redactor.start(start)
        if shown:
            self._shown.add(start.call_id)
        try:
            await self._recorder.start(redacted, also)
        except Exception:  # then there is no end; after a cancellation there is one
            self._shown.discard(start.call_id)
            raise

    async def end(self, end: CallEnd, also: Sequence[Statement] = ()) -> None:
        shown = end.call_id in self._shown
        self._shown.discard(end.call_id)
        redacted = self._redactor.end(end, shown=shown)
        await self._recorder.end(redacted, also)
        if end.trainable and not redacted.trainable:
            self._on_redacted()
