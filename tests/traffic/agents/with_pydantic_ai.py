# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.62.0"]
# ///
"""Pydantic AI: tools, message history, output that is validated and asked for again, agents as tools, Responses."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, PromptedOutput, UnexpectedModelBehavior
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from rollouts import SYSTEM, Rollout, found, main


class Finding(BaseModel):
    place: str
    year: int


def search(query: str) -> str:
    """Search the archive."""
    if len(query) % 5 == 0:
        raise ModelRetry("Say it in other words.")
    return found(query)


def provider(rollout: Rollout) -> OpenAIProvider:
    api = AsyncOpenAI(base_url=rollout.url, api_key=rollout.key, default_headers=rollout.headers)
    return OpenAIProvider(openai_client=api)


def chat(rollout: Rollout) -> Any:
    return OpenAIChatModel("policy", provider=provider(rollout))


def items(rollout: Rollout) -> Any:
    return OpenAIResponsesModel("policy", provider=provider(rollout))


async def converse(agent: Any, rollout: Rollout, turns: int = 3, stream: bool = False) -> None:
    history: Any = None
    for turn in range(turns):
        message = rollout.more() if turn else rollout.task
        try:
            if stream:
                async with agent.run_stream(message, message_history=history) as streaming:
                    await streaming.get_output()
                result = streaming
            else:
                result = await agent.run(message, message_history=history)
        except UnexpectedModelBehavior:  # it tried too often
            return
        history = result.all_messages()


async def tools(rollout: Rollout) -> None:
    await converse(Agent(chat(rollout), instructions=SYSTEM, tools=[search], retries=5), rollout)


async def streamed(rollout: Rollout) -> None:
    await converse(Agent(chat(rollout), instructions=SYSTEM, tools=[search], retries=5), rollout, stream=True)


async def responses(rollout: Rollout) -> None:
    await converse(Agent(items(rollout), system_prompt=SYSTEM, tools=[search], retries=5), rollout)


async def structured(rollout: Rollout) -> None:
    agent = Agent(chat(rollout), instructions=SYSTEM, tools=[search], output_type=Finding, retries=5)

    @agent.output_validator
    def even(output: Finding) -> Finding:
        if output.year % 2:
            raise ModelRetry("Years are even here.")
        return output

    await converse(agent, rollout, 2)


async def prompted(rollout: Rollout) -> None:
    """The output is JSON in a text; what is no JSON is asked for again, here until there were too many tries."""
    await converse(
        Agent(chat(rollout), instructions=SYSTEM, output_type=PromptedOutput(Finding), retries=3), rollout, 1
    )


async def delegation(rollout: Rollout) -> None:
    worker = Agent(chat(rollout), instructions="You are a worker.", tools=[search], retries=5)
    lead = Agent(chat(rollout), instructions="You lead.", retries=5)

    @lead.tool_plain
    async def delegate(order: str) -> str:
        """Have a worker do something."""
        return str((await worker.run(order)).output)

    await converse(lead, rollout, 2)


async def latest_only(rollout: Rollout) -> None:
    """A processor keeps only the last messages of the history."""

    async def last(messages: list[Any]) -> list[Any]:
        return messages[-3:] if len(messages) % 2 else messages[-4:]

    await converse(Agent(chat(rollout), instructions=SYSTEM, capabilities=[ProcessHistory(last)]), rollout, 5)


if __name__ == "__main__":
    scenarios = [tools, streamed, responses, structured, prompted, delegation, latest_only]
    main({f"pydantic-ai-{s.__name__}": s for s in scenarios}, "pydantic-ai-slim")
