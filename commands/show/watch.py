"""`status --watch`: the state of the running system, again and again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live

from ...proxy.config.root import Config
from ..api_client import ApiClient, ApiError, ask
from ..formats import count, duration, number, plain, print_json
from ..signals import Interrupted
from .status import SHOWN_STEPS, next_step, read_status, status_view
from .steps import steps_table

EVERY_S = 2.0


def watch_status(config: Config, *, as_json: bool) -> None:
    """Show the state until Ctrl-C: a page on a terminal, elsewhere a line whenever something changed."""
    console = Console(highlight=False)

    async def follow(api: ApiClient) -> None:
        if as_json or not console.is_terminal:
            await _lines(config, api, console, as_json=as_json)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(await _page(config, api), refresh=True)
                await asyncio.sleep(EVERY_S)

    try:
        ask(config, follow)
    except Interrupted:
        return


async def _lines(config: Config, api: ApiClient, console: Console, *, as_json: bool) -> None:
    shown = ""
    while True:
        try:
            status = await read_status(api)
            line = status_line(status)
            if as_json:
                status["next_step"] = next_step(config.trainer, status, time.time())
                print_json({"url": api.url, **status})
        except ApiError as error:
            line = error.message
            if as_json:
                print_json({"url": api.url, "error": error.message})
        if line != shown and not as_json:
            console.print(plain(f"{time.strftime('%H:%M:%S')} {line}"), soft_wrap=True)
        shown = line
        await asyncio.sleep(EVERY_S)


def status_line(status: dict[str, Any]) -> str:
    """Return the state in one line, without fields that change by themselves."""
    ready, policy, last = status["ready"], status["policy"], None
    parts = [str(ready["status"])]
    parts += [f"{part} {ready[part]}" for part in ("store", "upstream") if ready[part] != "ok"]
    if policy is not None:
        parts.append(f"version {policy['live_version']}")
        last = policy["last_step"]
    rollouts = sum(sum(counts.values()) for counts in status["rollouts"].values())
    parts += [f"{count(rollouts)} rollouts", f"{count(status['waiting'])} wait"]
    if last is not None:
        parts.append(f"step {last['step']}, reward {number(last['metrics'].get('reward_mean'))}")
    return ", ".join(parts)


async def _page(config: Config, api: ApiClient) -> RenderableType:
    now = time.time()
    head = plain(f"{time.strftime('%H:%M:%S')}  every {duration(EVERY_S)}; Ctrl-C ends", "dim")
    try:
        status = await read_status(api)
    except ApiError as error:
        return Group(head, plain(error.message, "red"))
    status["next_step"] = next_step(config.trainer, status, now)
    steps = status["steps"][-SHOWN_STEPS:]
    table: list[RenderableType] = [plain(""), steps_table(steps)] if len(steps) > 1 else []
    return Group(head, status_view(status, api.url, now), *table)
