# /// script
# requires-python = ">=3.11"
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5", "openai==3.54.0"]
# ///
"""An AutoGen agent that solves word problems with a calculator: `python agent.py "Ben has 55 books and …"`."""

import ast
import asyncio
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown")
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "48"))
SYSTEM = "Solve the problem with the calculator, then answer with just the number."
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Compute an expression of whole numbers with + - * / and brackets, such as (3 + 4) * 5."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"error: {error}"


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("only whole numbers, + - * / and brackets")


def solve(task: dict[str, Any]) -> str:
    """The agent's last word on `task["question"]`; nothing where it never comes to one."""
    return asyncio.run(_solve(task["question"]))


async def _solve(question: str) -> str:
    model = OpenAIChatCompletionClient(
        model=os.environ.get("MODEL", "policy"), model_info=INFO, temperature=1, max_tokens=MAX_TOKENS
    )
    agent = AssistantAgent("solver", model, tools=[calculator], system_message=SYSTEM, max_tool_iterations=3)
    result = await agent.run(task=question)
    await model.close()
    last = result.messages[-1]  # a summary of tool calls, where the agent went on calling to the end
    return last.content if isinstance(last, TextMessage) and last.source == agent.name else ""


if __name__ == "__main__":
    print(solve({"question": sys.argv[1]}))
