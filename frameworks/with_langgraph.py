# /// script
# requires-python = ">=3.11"
# dependencies = ["langgraph==1.2.22", "langchain-openai==1.7.3"]
# ///
"""LangGraph: a graph of one's own, model and tools taking turns."""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def graph_with(headers: dict[str, str]) -> Any:
    model = ChatOpenAI(model="policy", default_headers=headers).bind_tools([multiply])
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=InMemorySaver())


def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    graph, config = graph_with(headers), {"configurable": {"thread_id": "1"}}
    for question in questions:
        said: Any = {"messages": [{"role": "user", "content": question}]}
        if stream:
            parts = graph.stream(said, config, stream_mode="messages")
            print("".join(str(part.content) for part, _ in parts if part.type == "AIMessageChunk"))
        else:
            print(graph.invoke(said, config)["messages"][-1].content)


if __name__ == "__main__":
    from asked import HEADERS, QUESTIONS, STREAM

    main(HEADERS, QUESTIONS, STREAM)
