"""Which functions of the proxy run for one request, in the order in which they begin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

import lightning_proxy
from support.paths import TOPS

ROOT = Path(lightning_proxy.__file__).parent

_WALKED: ContextVar[bool] = ContextVar("walked", default=False)


class Walk:
    """The functions that ran for a request, in its own task and those that it began; background work has others."""

    def __init__(self) -> None:
        self.functions: list[CodeType] = []

    @property
    def files(self) -> list[str]:
        """The files of these functions, relative to the product's root."""
        return list(dict.fromkeys(str(Path(code.co_filename).relative_to(ROOT)) for code in self.functions))

    def listing(self) -> str:
        """One line for each file, with its functions."""
        names: dict[str, list[str]] = {file: [] for file in self.files}
        for code in self.functions:
            names[str(Path(code.co_filename).relative_to(ROOT))].append(code.co_qualname)
        return "\n".join(f"{len(of):3} {file}: {', '.join(of)}" for file, of in names.items())


def marking(app: ASGIApp) -> ASGIApp:
    """The app, with each of its requests marked as what a walk follows."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        _WALKED.set(scope["type"] == "http")
        await app(scope, receive, send)

    return marked


@contextmanager
def walking(*, beside: bool = False) -> Iterator[Walk]:
    """Trace the requests that `marking` marks, or what runs `beside` them, in this thread and during the block."""
    walk, seen, product = Walk(), set[CodeType](), tuple(f"{ROOT / top}/" for top in TOPS)

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen and code.co_filename.startswith(product) and _WALKED.get() != beside:
            seen.add(code)
            walk.functions.append(code)

    sys.setprofile(on_event)
    try:
        yield walk
    finally:
        sys.setprofile(None)
