# /// script
# requires-python = ">=3.11"
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"]
# ///
"""AutoGen: an assistant of autogen-agentchat."""

import asyncio
from typing import Any

from asked import HEADERS, QUESTIONS, STREAM
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def main() -> None:
    model: Any = OpenAIChatCompletionClient(model="policy", model_info=INFO, default_headers=HEADERS)
    agent = AssistantAgent("assistant", model, tools=[multiply], reflect_on_tool_use=True, model_client_stream=STREAM)
    for question in QUESTIONS:
        result: Any = await agent.run(task=question)
        print(result.messages[-1].content)


asyncio.run(main())
