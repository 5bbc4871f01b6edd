# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""OpenAI's client for Python, without a framework: a loop that calls tools."""

import json
from typing import Any

from openai import OpenAI


def client_of(headers: dict[str, str]) -> OpenAI:
    return OpenAI(default_headers=headers)


NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False}
MULTIPLY: Any = {"type": "function", "function": {"name": "multiply", "parameters": PARAMETERS, "strict": True}}


def step(client: OpenAI, messages: list[Any]) -> Any:
    """The model's next message, and its tool calls done."""
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[MULTIPLY])
    return done(answer.choices[0].message, messages)


def done(message: Any, messages: list[Any]) -> Any:
    messages.append(message.to_dict())
    for call in message.tool_calls or ():
        numbers = json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] * numbers["b"])}
        messages.append(result)
    return message


def streamed(client: OpenAI, messages: list[Any]) -> Any:
    with client.chat.completions.stream(model="policy", messages=messages, tools=[MULTIPLY]) as stream:
        return done(stream.get_final_completion().choices[0].message, messages)


def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    client, messages = client_of(headers), list[Any]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        while (message := (streamed if stream else step)(client, messages)).tool_calls:
            pass
        print(message.content)


if __name__ == "__main__":
    from asked import HEADERS, QUESTIONS, STREAM

    main(HEADERS, QUESTIONS, STREAM)
