"""`up`: the system until Ctrl-C."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from ...core.config.root import Config
from ...store.sqlite.locks import keeping
from ...trainer.plan.settle import settle
from ..formats import address
from ..lines import LogFormat
from ..plan import plan_tables
from ..put_back import put_back_left
from ..vllm import without_tools
from .steps import tell_steps, tell_why_it_stands
from .system import Launch, System
from .view import UpView


async def up(config: Config, launch: Launch, logs: Path, console: Console, log_format: LogFormat = "text") -> None:
    """Run vLLM, proxy and trainer until cancelled or until vLLM or the proxy is lost; show their calls and steps."""
    settled = settle(config)
    if settled.plan is not None and log_format == "text":
        console.print(*plan_tables(settled), sep="\n")
    with UpView(console, logs, log_format) as view:
        if warning := without_tools(config):
            view.say(warning, "yellow")
        await put_back_left(config, view.say)
        parts = System(config, launch, logs, view.say, needs_trainer=False, serve_options=view.serve_options)
        async with _told_to_others(config), parts as system:
            root = f"http://{address(config.proxy.host, config.proxy.port)}"
            ready = f"ready: OPENAI_BASE_URL={root}/v1, model {config.policy.alias!r}; logs in {logs}/; Ctrl-C stops"
            view.say(ready, "bold")
            view.say(f"look at it in a browser: {root}/")
            await system.guard(_show(config, logs, view))


@asynccontextmanager
async def _told_to_others(config: Config) -> AsyncIterator[None]:
    """Hold the lock that tells other commands why the proxy is not there yet."""
    with ExitStack() as stack:
        if not config.store.is_postgres:
            path = config.store.path.expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(keeping(path, "up"))
        yield


async def _show(config: Config, logs: Path, view: UpView) -> None:
    say = partial(view.say, style="red")
    steps = tell_steps(config.store, view.console, view.step, say)
    standing = tell_why_it_stands(logs / "trainer.log", say, math.inf)  # without rollouts it says nothing
    await asyncio.gather(view.follow(logs / "proxy.log"), steps, standing)
