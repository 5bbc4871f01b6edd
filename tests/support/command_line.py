"""The command line, run in this process: milliseconds in place of the seconds that a new one takes to import."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import threading
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from typer.main import get_command

from lightning_proxy.cli import app

_command = functools.cache(lambda: get_command(app))  # to make it takes longer than most commands do
_one_at_a_time = threading.Lock()  # the streams and the working directory belong to the whole process


class Done(NamedTuple):
    """What a command leaves."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def lightning(*arguments: str | Path, cwd: Path | None = None) -> Done:
    """Run a command to its end; in any thread, so that no signal stops it."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="", write_through=True) for _ in range(2))
    ignored = dict.fromkeys(("add_signal_handler", "remove_signal_handler"), lambda *_: None)
    with (
        _one_at_a_time, patch.dict(os.environ, {"COLUMNS": "80"}), chdir(cwd or "."),
        patch.multiple(asyncio.SelectorEventLoop, **ignored),  # only the main thread can be told of signals
        redirect_stdout(out), redirect_stderr(err),
    ):  # fmt: skip
        try:
            _command()([*map(str, arguments)], prog_name="lightning-proxy")
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int | None), code
    for stream in (out, err):
        stream.seek(0)
    return Done(code or 0, out.read(), err.read())
