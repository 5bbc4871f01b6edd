"""The command line, run in this process: milliseconds in place of the seconds that a new one takes to import."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from lightning_proxy.cli import app

_one_at_a_time = threading.Lock()  # the streams and the working directory belong to the whole process


class Done(NamedTuple):
    """What a command leaves."""

    returncode: int
    stdout: str
    stderr: str


def lightning(*arguments: str | Path, cwd: Path | None = None) -> Done:
    """Run a command to its end; in any thread, so that no signal stops it."""
    out, err = _Text(), _Text()
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(patch.dict(os.environ, {"COLUMNS": "80"}))
        stack.enter_context(patch.object(asyncio.SelectorEventLoop, "add_signal_handler", _no_signals))
        stack.enter_context(patch.object(asyncio.SelectorEventLoop, "remove_signal_handler", _no_signals))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        if cwd is not None:
            stack.enter_context(chdir(cwd))
        try:
            app(list(map(str, arguments)), prog_name="lightning-proxy")
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int | None), code
    return Done(code or 0, out.text(), err.text())


def _no_signals(*_: object) -> None:
    """Only the main thread can be told of them."""


class _Text(io.TextIOWrapper):
    """A stream that is kept as text, and takes bytes too."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="", write_through=True)

    def text(self) -> str:
        self.seek(0)
        return self.read()
