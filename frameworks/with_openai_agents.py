# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""The OpenAI Agents SDK over the Responses API, which is its default, or over chat completions."""

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent_with(headers: dict[str, str], api: str = "responses") -> Agent:
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    model = kind("policy", AsyncOpenAI(default_headers=headers))
    return Agent("Assistant", instructions="Use your tools.", tools=[multiply], model=model)


async def converse(agent: Agent, questions: list[str], stream: bool) -> None:
    session = SQLiteSession("1")
    for question in questions:
        if stream:
            streaming = Runner.run_streamed(agent, question, session=session)
            async for _ in streaming.stream_events():
                pass
            print(streaming.final_output)
        else:
            print((await Runner.run(agent, question, session=session)).final_output)


if __name__ == "__main__":
    import asyncio

    from asked import API, HEADERS, QUESTIONS, STREAM

    asyncio.run(converse(agent_with(HEADERS, API), QUESTIONS, STREAM))
