# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""The OpenAI Agents SDK: tools, handoffs, agents as tools, sessions, structured output; chat and Responses."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.extensions import handoff_filters
from openai import AsyncOpenAI
from pydantic import BaseModel
from rollouts import SYSTEM, Rollout, found, main

set_tracing_disabled(True)


@function_tool
def search(query: str) -> str:
    """Search the archive."""
    return found(query)


class Finding(BaseModel):
    place: str
    year: int


def client(rollout: Rollout) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=rollout.url, api_key=rollout.key, default_headers=rollout.headers)


def chat(rollout: Rollout) -> Any:
    return OpenAIChatCompletionsModel("policy", client(rollout))


def items(rollout: Rollout) -> Any:
    return OpenAIResponsesModel("policy", client(rollout))


async def converse(agent: Agent, rollout: Rollout, turns: int = 2, stream: bool = False, **more: Any) -> None:
    session = SQLiteSession(rollout.name) if not more else None
    for turn in range(turns):
        message = rollout.more() if turn else rollout.task
        try:
            if stream:
                async for _ in (
                    streaming := Runner.run_streamed(agent, message, session=session, **more)
                ).stream_events():
                    pass
                result: Any = streaming
            else:
                result = await Runner.run(agent, message, session=session, **more)
        except MaxTurnsExceeded:
            return
        if more:
            more["previous_response_id"] = result.last_response_id


def researcher(model: Any, **more: Any) -> Agent:
    return Agent("researcher", instructions=SYSTEM, tools=[search], model=model, **more)


async def tools(rollout: Rollout) -> None:
    await converse(researcher(chat(rollout)), rollout)


async def streamed(rollout: Rollout) -> None:
    await converse(researcher(chat(rollout)), rollout, stream=True)


async def responses(rollout: Rollout) -> None:
    settings = ModelSettings(reasoning={"effort": "low"})
    await converse(researcher(items(rollout), model_settings=settings), rollout)


async def responses_streamed(rollout: Rollout) -> None:
    await converse(researcher(items(rollout)), rollout, stream=True)


async def previous_response(rollout: Rollout) -> None:
    await converse(researcher(items(rollout)), rollout, auto_previous_response_id=True)


def team(model: Any, **more: Any) -> Agent:
    historian = Agent("historian", instructions="You know the past.", tools=[search], model=model)
    critic = Agent("critic", instructions="You find mistakes.", model=model)
    historian.handoffs = [handoff(critic, **more)]
    handoffs = [handoff(historian, **more), handoff(critic, **more)]
    return Agent("triage", instructions="You decide who answers.", handoffs=handoffs, model=model)


async def handoffs(rollout: Rollout) -> None:
    await converse(team(chat(rollout)), rollout)


async def handoffs_responses(rollout: Rollout) -> None:
    await converse(team(items(rollout)), rollout)


async def handoffs_nested(rollout: Rollout) -> None:
    """The next agent is given the history as one text."""
    await converse(team(chat(rollout), nest_handoff_history=True), rollout)


async def handoffs_filtered(rollout: Rollout) -> None:
    """The next agent is given the history without the tool calls."""
    await converse(team(chat(rollout), input_filter=handoff_filters.remove_all_tools), rollout)


async def agents_as_tools(rollout: Rollout) -> None:
    model = chat(rollout)
    workers = [
        Agent(name, instructions=f"You are a {name}.", model=model, tools=[search]) for name in ("poet", "clerk")
    ]
    as_tools: Any = [worker.as_tool(f"ask_{worker.name}", f"Asks the {worker.name}.") for worker in workers]
    await converse(Agent("lead", instructions="You lead a team.", tools=as_tools, model=model), rollout, 1)


async def structured(rollout: Rollout) -> None:
    await converse(researcher(chat(rollout), output_type=Finding), rollout)


if __name__ == "__main__":
    scenarios = [
        tools, streamed, responses, responses_streamed, previous_response, handoffs, handoffs_responses,
        handoffs_nested, handoffs_filtered, agents_as_tools, structured,
    ]  # fmt: skip
    main({f"openai-agents-{s.__name__}": s for s in scenarios}, "openai-agents")
