# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain==1.4.7", "langchain-openai==1.7.3"]
# ///
"""LangChain: an agent that remembers."""

from typing import Any

from asked import HEADERS, QUESTIONS, STREAM
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


model = ChatOpenAI(model="policy", default_headers=HEADERS)
agent: Any = create_agent(model, [multiply], checkpointer=InMemorySaver())
config = {"configurable": {"thread_id": "1"}}
for question in QUESTIONS:
    said = {"messages": [{"role": "user", "content": question}]}
    if STREAM:
        parts = agent.stream(said, config, stream_mode="messages")
        print("".join(str(part.content) for part, _ in parts if part.type == "AIMessageChunk"))
    else:
        print(agent.invoke(said, config)["messages"][-1].content)
