# /// script
# requires-python = ">=3.11"
# dependencies = ["langgraph==1.2.22", "langchain-openai==1.7.3"]
# ///
"""A LangGraph of three agents that answer questions with SQL: `uv run agent.py "Name the singers from Peru."`."""

import os
import sys
from typing import Any, TypedDict

from database import Rows, run, schema
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

WRITER = "Write one SQL query that answers the question."
CHECKER = "Check whether the SQL query answers the question. Say yes or no."
REWRITER = "Rewrite the SQL query, which does not answer the question."
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "40"))
SHOWN = 60  # characters of a result


class State(TypedDict, total=False):
    question: str
    database: str
    sql: str
    result: str
    verdict: str
    rewritten: bool


def solve(task: dict[str, Any]) -> str:
    """The last SQL that the agents wrote for `task["question"]`."""
    state = GRAPH.invoke({"question": task["question"], "database": task["database"]})
    return str(state["sql"])


def _ask(agent: str, system: str, *told: str, max_tokens: int = MAX_TOKENS) -> str:
    """One agent's answer, on one line and out of its Markdown."""
    model = ChatOpenAI(
        model=os.environ.get("MODEL", "policy"),
        temperature=1,
        max_tokens=max_tokens,
        default_headers={"X-Agent-Name": agent},
    )
    answer = str(model.invoke([("system", system), ("user", "\n".join(told))]).content)
    readable = answer.encode(errors="replace").decode()
    return " ".join(readable.replace("```sql", " ").replace("```", " ").split())


def _write(state: State) -> State:
    return {"sql": _ask("writer", WRITER, schema(state["database"]), state["question"])}


def _execute(state: State) -> State:
    return {"result": _shown(run(state["database"], state["sql"]))}


def _check(state: State) -> State:
    verdict = _ask("checker", CHECKER, state["question"], state["sql"], state["result"], max_tokens=4)
    return {"verdict": verdict.lower()}


def _rewrite(state: State) -> State:
    told = (schema(state["database"]), state["question"], state["sql"], state["result"])
    return {"sql": _ask("rewriter", REWRITER, *told), "rewritten": True}


def _shown(rows: Rows | str) -> str:
    """A result as an agent reads it."""
    text = rows if isinstance(rows, str) else ", ".join(" ".join(map(str, row)) for row in rows) or "nothing"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _graph() -> Any:
    graph: Any = StateGraph(State)
    for name, node in (("write", _write), ("execute", _execute), ("check", _check), ("rewrite", _rewrite)):
        graph.add_node(name, node)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_conditional_edges("execute", lambda state: END if state.get("rewritten") else "check", ["check", END])
    graph.add_conditional_edges(
        "check", lambda state: "rewrite" if state["verdict"].startswith("no") else END, ["rewrite", END]
    )
    graph.add_edge("rewrite", "execute")
    return graph.compile()


GRAPH = _graph()

if __name__ == "__main__":
    print(solve({"question": sys.argv[1], "database": sys.argv[2] if len(sys.argv) > 2 else "concerts"}))
