# /// script
# requires-python = ">=3.11"
# dependencies = ["ag2[openai]==1.2.1"]
# ///
"""AG2: an agent and its tool."""

import asyncio

from ag2 import Agent, tool
from ag2.config import OpenAIConfig
from asked import HEADERS, QUESTIONS, STREAM


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def main() -> None:
    config = OpenAIConfig("policy", streaming=STREAM, default_headers=HEADERS)
    asked = Agent("assistant", "Use your tools.", config=config, tools=[multiply])
    for question in QUESTIONS:
        asked = await asked.ask(question)
        print(asked.body)


asyncio.run(main())
