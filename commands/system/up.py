"""`up`: the whole system until Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ...proxy.config.root import Config
from ...trainer.plan.settle import settle
from ..plan import plan_tables
from ..vllm import without_tools
from .processes import address
from .steps import tell_steps
from .system import Launch, System


async def up(config: Config, launch: Launch, logs: Path, console: Console) -> None:
    """Run vLLM, proxy and trainer until cancelled or until vLLM or the proxy is lost, with a line per training step."""

    def say(what: str) -> None:
        console.print(f"[dim]{what}[/]")

    settled = settle(config)
    if settled.plan is not None:
        console.print(*plan_tables(settled), sep="\n")
    if told := without_tools(config):
        console.print(told, style="yellow", markup=False)
    async with System(config, launch, logs, say, needs_trainer=False) as system:
        url = f"http://{address(config.proxy.host, config.proxy.port)}/v1"
        console.print(f"ready: OPENAI_BASE_URL={url}, model {config.policy.alias!r}; logs in {logs}/; Ctrl-C stops")
        await system.guard(tell_steps(config.store, console))
