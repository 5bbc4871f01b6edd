# /// script
# requires-python = ">=3.11"
# dependencies = ["ag2[openai]==1.2.1"]
# ///
"""AG2: an agent and its tool."""

from ag2 import Agent, tool
from ag2.config import OpenAIConfig


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent_with(headers: dict[str, str], stream: bool = False) -> Agent:
    config = OpenAIConfig("policy", streaming=stream, default_headers=headers)
    return Agent("assistant", "Use your tools.", config=config, tools=[multiply])


async def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    asked = agent_with(headers, stream)
    for question in questions:
        reply = await asked.ask(question)
        asked = reply
        print(reply.body)


if __name__ == "__main__":
    import asyncio

    from asked import HEADERS, QUESTIONS, STREAM

    asyncio.run(main(HEADERS, QUESTIONS, STREAM))
