# /// script
# requires-python = ">=3.11"
# dependencies = ["agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"]
# ///
"""Microsoft's Agent Framework over the Responses API, which is its default: the server keeps the conversation."""

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient


@tool(approval_mode="never_require")
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent_with(headers: dict[str, str]) -> Agent:
    client = OpenAIChatClient("policy", default_headers=headers)
    return Agent(client, "Use your tools.", tools=[multiply])


async def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    agent = agent_with(headers)
    session = agent.create_session()
    for question in questions:
        if stream:
            streaming = agent.run(question, session=session, stream=True)
            async for _ in streaming:
                pass
            print((await streaming.get_final_response()).text)
        else:
            print((await agent.run(question, session=session)).text)


if __name__ == "__main__":
    import asyncio

    from asked import HEADERS, QUESTIONS, STREAM

    asyncio.run(main(HEADERS, QUESTIONS, STREAM))
