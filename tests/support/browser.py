"""A real browser of this machine, headless, that remembers whatever went wrong in the page."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import ConsoleMessage, Dialog, Page, Request, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

needs_browser = pytest.mark.skipif(PATH is None, reason=f"no browser on PATH ({', '.join(NAMES)}) or in CHROMIUM")

# The browser's own words for an answer of 400 or more, which no script can keep it from saying.
REFUSED = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")


@dataclass
class Wrong:
    """What went wrong: dialogs, scripts' errors, refused policies, requests to others than the proxy."""

    seen: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)  # statuses of answers that were errors

    def watch(self, page: Page, origin: str) -> None:
        async def on_dialog(dialog: Dialog) -> None:
            self.seen.append(f"dialog: {dialog.message}")
            await dialog.dismiss()

        def on_console(message: ConsoleMessage) -> None:
            if refused := REFUSED.match(message.text):
                self.refused.append(int(refused[1]))
            elif message.type in ("error", "warning"):
                self.seen.append(f"console: {message.text}")

        def on_request(request: Request) -> None:
            if not request.url.startswith((origin, "data:")):
                self.seen.append(f"request: {request.url}")

        page.on("dialog", on_dialog)
        page.on("console", on_console)
        page.on("pageerror", lambda error: self.seen.append(f"error: {error}"))
        page.on("request", on_request)


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[tuple[Page, Wrong]]:
    """A page of its own profile, and what goes wrong in it. `options`: of playwright's `new_page`."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        try:
            page, wrong = await browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | options), Wrong()
            page.set_default_timeout(10_000)
            wrong.watch(page, url.partition("#")[0])
            await page.goto(url)
            yield page, wrong
        finally:
            await browser.close()
