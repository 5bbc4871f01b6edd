# /// script
# requires-python = ">=3.11"
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"]
# ///
"""AutoGen: an assistant of autogen-agentchat."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent_with(headers: dict[str, str], stream: bool = False) -> AssistantAgent:
    model: Any = OpenAIChatCompletionClient(model="policy", model_info=INFO, default_headers=headers)
    return AssistantAgent("assistant", model, tools=[multiply], reflect_on_tool_use=True, model_client_stream=stream)


async def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    agent = agent_with(headers, stream)
    for question in questions:
        result: Any = await agent.run(task=question)
        print(result.messages[-1].content)


if __name__ == "__main__":
    import asyncio

    from asked import HEADERS, QUESTIONS, STREAM

    asyncio.run(main(HEADERS, QUESTIONS, STREAM))
