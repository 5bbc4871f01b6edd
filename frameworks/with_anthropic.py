# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.11.0"]
# ///
"""Anthropic's client for Python: its own loop over tools."""

from typing import Any

from anthropic import Anthropic, beta_tool
from asked import HEADERS, QUESTIONS, STREAM


@beta_tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


client, messages = Anthropic(default_headers=HEADERS), list[Any]()
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    asked: Any = {"model": "policy", "max_tokens": 1000, "messages": messages, "tools": [multiply], "stream": STREAM}
    runner: Any = client.beta.messages.tool_runner(**asked)
    for turn in runner:
        message = turn.get_final_message() if STREAM else turn
        messages.append({"role": "assistant", "content": message.content})
        if result := runner.generate_tool_call_response():
            messages.append(result)
    print(message.content[-1].text)
