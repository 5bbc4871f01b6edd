"""HTTP clients for OpenAI's library that connect to the proxy directly, not through the environment's HTTP proxy."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from openai import DefaultAsyncHttpxClient, DefaultHttpxClient


class Http(DefaultHttpxClient):
    """Closes itself when nothing refers to it any more, as OpenAI's own does."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


class AsyncHttp(DefaultAsyncHttpxClient):
    """Closes itself when nothing refers to it any more, as OpenAI's own does."""

    _closing: asyncio.Task[Any]

    def __init__(self) -> None:
        super().__init__(trust_env=False)

    def __del__(self) -> None:
        with suppress(Exception):
            if not self.is_closed:
                self._closing = asyncio.get_running_loop().create_task(self.aclose())
