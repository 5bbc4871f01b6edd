# /// script
# requires-python = ">=3.11"
# dependencies = ["claude-agent-sdk==0.2.184"]
# ///
"""The Claude Agent SDK: Claude Code's own loop, with a tool of this program."""

from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, create_sdk_mcp_server, tool


@tool("multiply", "Multiply two integers.", {"a": int, "b": int})
async def multiply(numbers: Any) -> Any:
    return {"content": [{"type": "text", "text": str(numbers["a"] * numbers["b"])}]}


def options_with(headers: dict[str, str]) -> ClaudeAgentOptions:
    calculator = create_sdk_mcp_server("calculator", tools=[multiply])
    named = {"ANTHROPIC_CUSTOM_HEADERS": "\n".join(f"{name}: {value}" for name, value in headers.items())}
    servers, allowed = {"calculator": calculator}, ["mcp__calculator__multiply"]
    return ClaudeAgentOptions(model="policy", env=named, tools=[], mcp_servers=servers, allowed_tools=allowed)


async def main(headers: dict[str, str], questions: list[str]) -> None:
    async with ClaudeSDKClient(options_with(headers)) as client:
        for question in questions:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, ResultMessage):
                    print(message.result)


if __name__ == "__main__":
    import asyncio

    from asked import HEADERS, QUESTIONS
    from claude_agent_sdk import ResultMessage

    asyncio.run(main(HEADERS, QUESTIONS))
