# /// script
# requires-python = ">=3.11"
# dependencies = ["agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"]
# ///
"""Microsoft's Agent Framework over the Responses API, its default: the server keeps the conversation. Or over chat."""

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient


@tool(approval_mode="never_require")
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def agent_with(headers: dict[str, str], api: str = "responses") -> Agent:
    kind = OpenAIChatCompletionClient if api == "chat" else OpenAIChatClient
    return Agent(kind("policy", default_headers=headers), "Use your tools.", tools=[multiply])


async def main(agent: Agent, questions: list[str], stream: bool) -> None:
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

    from asked import API, HEADERS, QUESTIONS, STREAM

    asyncio.run(main(agent_with(HEADERS, API), QUESTIONS, STREAM))
