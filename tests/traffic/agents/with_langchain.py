# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain==1.4.7", "langchain-openai==1.7.3", "langgraph==1.2.22"]
# ///
"""LangChain's agents (LangGraph underneath): tools, streaming, sub-agents, summaries, structured output, Responses."""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ContextEditingMiddleware, SummarizationMiddleware
from langchain.agents.middleware.context_editing import ClearToolUsesEdit
from langchain.agents.structured_output import ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, field_validator
from rollouts import SYSTEM, Rollout, found, main


@tool
def search(query: str) -> str:
    """Search the archive."""
    return found(query)


@tool
def take_note(text: str, importance: Literal["low", "high"]) -> str:
    """Keep something for later."""
    return "noted"


class Finding(BaseModel):
    """What was found."""

    place: str
    year: int
    sources: list[str]

    @field_validator("year")
    @classmethod
    def even(cls, year: int) -> int:
        if year % 2:
            raise ValueError("years are even here")
        return year


def model(rollout: Rollout, **more: Any) -> ChatOpenAI:
    names = {"base_url": rollout.url, "api_key": rollout.key, "default_headers": rollout.headers}
    return ChatOpenAI(model="policy", **names, **more)


async def converse(agent: Any, rollout: Rollout, turns: int = 3, stream: bool = False) -> None:
    config = {"configurable": {"thread_id": rollout.name}, "recursion_limit": 40}
    for turn in range(turns):
        message = {"messages": [{"role": "user", "content": rollout.more() if turn else rollout.task}]}
        if stream:
            async for _ in agent.astream(message, config, stream_mode="messages"):
                pass
        else:
            await agent.ainvoke(message, config)


async def tools(rollout: Rollout) -> None:
    agent = create_agent(model(rollout), [search, take_note], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    await converse(agent, rollout)


async def streamed(rollout: Rollout) -> None:
    api = model(rollout, streaming=True)
    agent = create_agent(api, [search, take_note], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    await converse(agent, rollout, stream=True)


async def responses(rollout: Rollout) -> None:
    api = model(rollout, use_responses_api=True, output_version="responses/v1", reasoning={"effort": "low"})
    agent = create_agent(api, [search, take_note], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    await converse(agent, rollout)


async def previous_response(rollout: Rollout) -> None:
    api = model(rollout, use_responses_api=True, use_previous_response_id=True)
    agent = create_agent(api, [search, take_note], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    await converse(agent, rollout)


async def summarised(rollout: Rollout) -> None:
    middleware = SummarizationMiddleware(model(rollout), trigger=("messages", 8), keep=("messages", 3))
    agent = create_agent(
        model(rollout), [search], system_prompt=SYSTEM, middleware=[middleware], checkpointer=InMemorySaver()
    )
    await converse(agent, rollout, 4)


async def cleared(rollout: Rollout) -> None:
    """Old tool results are taken out of the history."""
    middleware = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=100, keep=1)])
    agent = create_agent(
        model(rollout), [search], system_prompt=SYSTEM, middleware=[middleware], checkpointer=InMemorySaver()
    )
    await converse(agent, rollout, 4)


async def subagents(rollout: Rollout) -> None:
    """A supervisor whose tools are agents."""
    historian = create_agent(model(rollout), [search], system_prompt="You are a historian.")
    writer = create_agent(model(rollout), [], system_prompt="You are a writer.")

    async def hand_to(agent: Any, request: str) -> str:
        result = await agent.ainvoke({"messages": [{"role": "user", "content": request}]}, {"recursion_limit": 40})
        return str(result["messages"][-1].content)

    @tool
    async def ask_historian(request: str) -> str:
        """Ask the historian."""
        return await hand_to(historian, request)

    @tool
    async def ask_writer(request: str) -> str:
        """Ask the writer."""
        return await hand_to(writer, request)

    supervisor = create_agent(model(rollout), [ask_historian, ask_writer], system_prompt="You lead a team.")
    await converse(supervisor, rollout, 1)


async def structured(rollout: Rollout) -> None:
    """The output is a tool's arguments; where they are not valid, it is asked for again."""
    agent = create_agent(model(rollout), [search], system_prompt=SYSTEM, response_format=ToolStrategy(Finding))
    await converse(agent, rollout, 1)


if __name__ == "__main__":
    scenarios = [tools, streamed, responses, previous_response, summarised, cleared, subagents, structured]
    main({f"langchain-{s.__name__}": s for s in scenarios}, "langchain", "langgraph", "langchain-openai")
