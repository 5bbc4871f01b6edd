# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "agent-framework-core==1.23.0",
#     "agent-framework-openai==1.17.0",
#     "agent-framework-orchestrations==1.4.0",
# ]
# ///
"""Microsoft's Agent Framework: tools, sessions, agents as tools, and its orchestrations of several agents."""

from __future__ import annotations

from typing import Annotated, Any

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from agent_framework.orchestrations import ConcurrentBuilder, HandoffBuilder, SequentialBuilder
from rollouts import SYSTEM, Rollout, found, main


@tool(approval_mode="never_require")
def search(query: Annotated[str, "what to look for"]) -> str:
    """Search the archive."""
    return found(query)


def chat(rollout: Rollout) -> Any:
    return OpenAIChatCompletionClient(
        "policy", base_url=rollout.url, api_key=rollout.key, default_headers=rollout.headers
    )


def items(rollout: Rollout) -> Any:
    return OpenAIChatClient("policy", base_url=rollout.url, api_key=rollout.key, default_headers=rollout.headers)


async def converse(agent: Agent, rollout: Rollout, stream: bool = False, **more: Any) -> None:
    session = agent.create_session()
    for turn in range(3):
        message = rollout.more() if turn else rollout.task
        if stream:
            async for _ in agent.run(message, session=session, stream=True, **more):
                pass
        else:
            await agent.run(message, session=session, **more)


async def tools(rollout: Rollout) -> None:
    await converse(Agent(chat(rollout), SYSTEM, tools=[search]), rollout)


async def streamed(rollout: Rollout) -> None:
    await converse(Agent(chat(rollout), SYSTEM, tools=[search]), rollout, stream=True)


async def responses(rollout: Rollout) -> None:
    """The server keeps the conversation."""
    await converse(Agent(items(rollout), SYSTEM, tools=[search]), rollout)


async def responses_unstored(rollout: Rollout) -> None:
    await converse(Agent(items(rollout), SYSTEM, tools=[search]), rollout, options={"store": False})


def team(api: Any) -> list[Agent]:
    names = ["writer", "critic", "editor"]
    return [Agent(api, f"You are the {name} of a newspaper.", name=name, description=name) for name in names]


async def agents_as_tools(rollout: Rollout) -> None:
    api = chat(rollout)
    as_tools = [agent.as_tool() for agent in team(api)[:2]]
    await Agent(api, "You lead a team.", tools=as_tools).run(rollout.task)


async def sequential(rollout: Rollout) -> None:
    await SequentialBuilder(participants=team(chat(rollout))).build().run(rollout.task)


async def concurrent(rollout: Rollout) -> None:
    """All are asked the same at once."""
    await ConcurrentBuilder(participants=team(chat(rollout))).build().run(rollout.task)


async def handoff(rollout: Rollout) -> None:
    api = chat(rollout)
    agents = [
        Agent(
            api,
            f"You are the {name} desk.",
            name=name,
            description=name,
            require_per_service_call_history_persistence=True,
        )
        for name in ("triage", "refunds", "orders")
    ]
    flow = HandoffBuilder(name="desks", participants=agents).with_start_agent(agents[0]).build()
    await flow.run(rollout.task)


if __name__ == "__main__":
    scenarios = [
        tools, streamed, responses, responses_unstored, agents_as_tools, sequential, concurrent, handoff,
    ]  # fmt: skip
    packages = ["agent-framework-core", "agent-framework-openai", "agent-framework-orchestrations"]
    main({f"agent-framework-{s.__name__}": s for s in scenarios}, *packages)
