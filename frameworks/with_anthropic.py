# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.11.0"]
# ///
"""Anthropic's client for Python: its own loop over tools."""

from typing import Any

from anthropic import Anthropic, beta_tool


@beta_tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


def ask(headers: dict[str, str], messages: list[Any], stream: bool) -> Any:
    client = Anthropic(default_headers=headers)
    asked: Any = {"model": "policy", "max_tokens": 1000, "messages": messages, "tools": [multiply], "stream": stream}
    return client.beta.messages.tool_runner(**asked)


def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    messages: list[Any] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        runner = ask(headers, messages, stream)
        for turn in runner:
            message = turn.get_final_message() if stream else turn
            messages.append({"role": "assistant", "content": message.content})
            if result := runner.generate_tool_call_response():
                messages.append(result)
        print(message.content[-1].text)


if __name__ == "__main__":
    from asked import HEADERS, QUESTIONS, STREAM

    main(HEADERS, QUESTIONS, STREAM)
