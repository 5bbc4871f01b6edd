# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents: agents that call tools, agents that write code, a manager of agents, plans."""

from __future__ import annotations

import asyncio
from typing import Any

from rollouts import Rollout, found, main
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Search the archive.

    Args:
        query: what to look for.
    """
    return found(query)


def model(rollout: Rollout) -> Any:
    return OpenAIModel(
        "policy", api_base=rollout.url, api_key=rollout.key, client_kwargs={"default_headers": rollout.headers}
    )


QUIET: Any = {"verbosity_level": LogLevel.OFF, "max_steps": 6}


async def tools(rollout: Rollout) -> None:
    agent = ToolCallingAgent([search], model(rollout), **QUIET)
    for turn in range(2):
        await asyncio.to_thread(agent.run, rollout.more() if turn else rollout.task, reset=False)


async def code(rollout: Rollout) -> None:
    agent = CodeAgent([search], model(rollout), **QUIET)
    for turn in range(2):
        await asyncio.to_thread(agent.run, rollout.more() if turn else rollout.task, reset=False)


async def planning(rollout: Rollout) -> None:
    agent = ToolCallingAgent([search], model(rollout), planning_interval=2, **QUIET)
    await asyncio.to_thread(agent.run, rollout.task)


async def managed(rollout: Rollout) -> None:
    worker = ToolCallingAgent([search], model(rollout), name="worker", description="Works.", **QUIET)
    agent = ToolCallingAgent([], model(rollout), managed_agents=[worker], **QUIET)
    await asyncio.to_thread(agent.run, rollout.task)


if __name__ == "__main__":
    scenarios = [tools, code, planning, managed]
    main({f"smolagents-{s.__name__}": s for s in scenarios}, "smolagents")
