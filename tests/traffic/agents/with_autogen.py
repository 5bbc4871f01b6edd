# /// script
# requires-python = ">=3.11"
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"]
# ///
"""AutoGen teams: agents of different system prompts that share one conversation."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import MagenticOneGroupChat, RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from rollouts import SYSTEM, Rollout, found, main


async def search(query: str) -> str:
    """Search the archive."""
    return found(query)


def model(rollout: Rollout) -> OpenAIChatCompletionClient:
    able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    info: Any = able | {"family": ModelFamily.UNKNOWN, "multiple_system_messages": True}
    return OpenAIChatCompletionClient(
        model="policy",
        base_url=rollout.url,
        api_key=rollout.key,
        default_headers=rollout.headers,
        model_info=info,
    )


def members(rollout: Rollout, **more: Any) -> list[Any]:
    api = model(rollout)
    writer = AssistantAgent("writer", api, system_message="You write the answer.", description="Writes.", **more)
    critic = AssistantAgent(
        "critic", api, system_message="You criticise the answer.", description="Criticises.", **more
    )
    scout = AssistantAgent(
        "scout", api, tools=[search], system_message=SYSTEM, description="Searches.", reflect_on_tool_use=True, **more
    )
    return [scout, writer, critic]


async def tools(rollout: Rollout) -> None:
    agent = AssistantAgent("scout", model(rollout), tools=[search], system_message=SYSTEM, max_tool_iterations=4)
    for turn in range(3):
        await agent.run(task=rollout.more() if turn else rollout.task)


async def round_robin(rollout: Rollout) -> None:
    await RoundRobinGroupChat(members(rollout), termination_condition=MaxMessageTermination(7)).run(task=rollout.task)


async def selector(rollout: Rollout) -> None:
    end = MaxMessageTermination(6)
    await SelectorGroupChat(members(rollout), model(rollout), termination_condition=end).run(task=rollout.task)


async def swarm(rollout: Rollout) -> None:
    api, names = model(rollout), ["writer", "critic", "scout"]
    agents: Any = [
        AssistantAgent(name, api, handoffs=[n for n in names if n != name], system_message=f"You are the {name}.")
        for name in names
    ]
    await Swarm(agents, termination_condition=MaxMessageTermination(12)).run(task=rollout.task)


async def society(rollout: Rollout) -> None:
    """A team as one agent of another."""
    inner = RoundRobinGroupChat(members(rollout)[1:], termination_condition=MaxMessageTermination(4))
    mind = SocietyOfMindAgent("society", inner, model(rollout))
    outer = RoundRobinGroupChat([mind, members(rollout)[0]], termination_condition=MaxMessageTermination(4))
    await outer.run(task=rollout.task)


async def magentic(rollout: Rollout) -> None:
    """An orchestrator with a plan and a ledger."""
    await MagenticOneGroupChat(members(rollout), model(rollout), max_turns=3).run(task=rollout.task)


if __name__ == "__main__":
    scenarios = [tools, round_robin, selector, swarm, society, magentic]
    main({f"autogen-{s.__name__}": s for s in scenarios}, "autogen-agentchat", "autogen-ext")
