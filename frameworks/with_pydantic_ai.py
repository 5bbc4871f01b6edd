# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""Pydantic AI: an agent and its history."""

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent_with(headers: dict[str, str]) -> Agent:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(default_headers=headers))
    return Agent(OpenAIChatModel("policy", provider=provider), tools=[multiply])


async def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    agent, history = agent_with(headers), None
    for question in questions:
        if stream:
            async with agent.run_stream(question, message_history=history) as result:
                print(await result.get_output())
        else:
            result = await agent.run(question, message_history=history)
            print(result.output)
        history = result.all_messages()


if __name__ == "__main__":
    import asyncio

    from asked import HEADERS, QUESTIONS, STREAM

    asyncio.run(main(HEADERS, QUESTIONS, STREAM))
