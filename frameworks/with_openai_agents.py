# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""The OpenAI Agents SDK over the Responses API, which is its default, or over chat completions."""

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, SQLiteSession, function_tool
from asked import API, HEADERS, QUESTIONS, STREAM
from openai import AsyncOpenAI


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def main() -> None:
    kind = OpenAIChatCompletionsModel if API == "chat" else OpenAIResponsesModel
    model = kind("policy", AsyncOpenAI(default_headers=HEADERS))
    agent = Agent("Assistant", instructions="Use your tools.", tools=[multiply], model=model)
    session = SQLiteSession("1")
    for question in QUESTIONS:
        if STREAM:
            streaming = Runner.run_streamed(agent, question, session=session)
            async for _ in streaming.stream_events():
                pass
            print(streaming.final_output)
        else:
            print((await Runner.run(agent, question, session=session)).final_output)


asyncio.run(main())
