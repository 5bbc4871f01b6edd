# /// script
# requires-python = ">=3.11"
# dependencies = ["agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"]
# ///
"""Microsoft's Agent Framework over the Responses API, its default: the server keeps the conversation. Or over chat."""

import asyncio

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from asked import API, HEADERS, QUESTIONS, STREAM


@tool(approval_mode="never_require")
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def main() -> None:
    kind = OpenAIChatCompletionClient if API == "chat" else OpenAIChatClient
    agent = Agent(kind("policy", default_headers=HEADERS), "Use your tools.", tools=[multiply])
    session = agent.create_session()
    for question in QUESTIONS:
        if STREAM:
            streaming = agent.run(question, session=session, stream=True)
            async for _ in streaming:
                pass
            print((await streaming.get_final_response()).text)
        else:
            print((await agent.run(question, session=session)).text)


asyncio.run(main())
