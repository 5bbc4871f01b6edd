"""Programs of agents run as processes of their own, through a proxy; what the store holds of them afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import re
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

Json = dict[str, Any]

# No telemetry, and nothing asked of other servers: there are none here.
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
SECONDS = 120  # for one run
TASK = "sums"


@dataclass(frozen=True)
class Run:
    """One run of a program. `rollout`: the one that it is named as, if it is named."""

    first: int  # of the numbers that it is asked to multiply
    root: str
    rollout: str | None = None
    api_key: str = "unnamed"
    headers: dict[str, str] = field(default_factory=dict)
    stream: bool = False

    @property
    def shown(self) -> str | None:
        """The credential that the model is shown: never a key of the proxy's own."""
        return None if self.api_key.startswith("lpk-") else self.api_key

    @property
    def questions(self) -> list[str]:
        return [f"What is {self.first} * 7?", f"And what is {self.first} * 11?"]

    @property
    def products(self) -> list[str]:
        return [str(self.first * 7), str(self.first * 11)]

    async def __call__(self, command: Sequence[str], home: Path) -> None:
        """Run the program; fails where it fails or does not say both products."""
        home.mkdir()
        environment = QUIET | {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "OPENAI_BASE_URL": f"{self.root}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root,
            "ANTHROPIC_API_KEY": self.api_key,
            "HEADERS": json.dumps(self.headers),
            "STREAM": "1" if self.stream else "",
        }
        process = await asyncio.create_subprocess_exec(
            *command, *self.questions, stdout=PIPE, stderr=PIPE, env=environment, cwd=home
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, f"ended with {process.returncode}: {err.decode()[-3000:]}"
        answers = re.findall(r"^Multiplied by the tool, the two numbers make (\d+)\.$", out.decode(), re.MULTILINE)
        assert answers == self.products, out.decode()[-3000:]


async def plan(proxy: str, session: aiohttp.ClientSession) -> list[Run]:
    """A run for each way to name a rollout, and two without a name."""
    named = {"X-Rollout-Id": "by-headers", "X-Task-Id": TASK}
    async with session.post("/rollouts", json={"task_id": TASK}) as answer:
        [opened] = await answer.json()
    return [
        Run(101, proxy, "by-headers", "headers", headers=named),
        Run(103, f"{proxy}/rollouts/by-url/tasks/{TASK}", "by-url", "url", stream=True),
        Run(107, proxy, opened["rollout_id"], opened["api_key"]),
        Run(109, proxy),
        Run(113, proxy, stream=True),
    ]


async def stored(session: aiohttp.ClientSession) -> dict[str, Json]:
    """Every rollout with its calls, by id."""
    async with session.get("/rollouts?limit=1000") as answer:
        ids = [rollout["rollout_id"] for rollout in (await answer.json())["data"]]
    found = {}
    for rollout_id in ids:
        async with session.get(f"/rollouts/{rollout_id}?requests=whole") as answer:
            found[rollout_id] = await answer.json()
    return found


def told(rollout: Json) -> list[str]:
    """What the tool is recorded to have answered, each time that it was called."""
    return [re.sub(r"\D", "", json.dumps(tool["result"])) for tool in multiplications(rollout)]


def multiplications(rollout: Json) -> list[Json]:
    tools = [tool for call in rollout["calls"] for tool in call["tool_calls"]]
    return [tool for tool in tools if tool["name"].endswith("multiply")]
