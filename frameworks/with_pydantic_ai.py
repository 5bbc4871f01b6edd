# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""Pydantic AI: an agent and its history."""

import asyncio

from asked import HEADERS, QUESTIONS, STREAM
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def main() -> None:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(default_headers=HEADERS))
    agent, history = Agent(OpenAIChatModel("policy", provider=provider), tools=[multiply]), None
    for question in QUESTIONS:
        if STREAM:
            async with agent.run_stream(question, message_history=history) as result:
                print(await result.get_output())
        else:
            result = await agent.run(question, message_history=history)
            print(result.output)
        history = result.all_messages()


asyncio.run(main())
