# /// script
# requires-python = ">=3.11"
# dependencies = ["claude-agent-sdk==0.2.184"]
# ///
"""The Claude Agent SDK: Claude Code's own loop, with a tool of this program."""

import asyncio
from typing import Any

from asked import HEADERS, QUESTIONS
from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage, create_sdk_mcp_server, tool


@tool("multiply", "Multiply two integers.", {"a": int, "b": int})
async def multiply(numbers: Any) -> Any:
    return {"content": [{"type": "text", "text": str(numbers["a"] * numbers["b"])}]}


async def main() -> None:
    calculator = create_sdk_mcp_server("calculator", tools=[multiply])
    named = {"ANTHROPIC_CUSTOM_HEADERS": "\n".join(f"{name}: {value}" for name, value in HEADERS.items())}
    servers, allowed = {"calculator": calculator}, ["mcp__calculator__multiply"]
    options = ClaudeAgentOptions(model="policy", env=named, tools=[], mcp_servers=servers, allowed_tools=allowed)
    async with ClaudeSDKClient(options) as client:
        for question in QUESTIONS:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    print(message.result)


asyncio.run(main())
