# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""OpenAI's client for Python, without a framework: a loop that calls tools."""

import json
from typing import Any

from asked import HEADERS, QUESTIONS, STREAM
from openai import OpenAI

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False}
MULTIPLY: Any = {"type": "function", "function": {"name": "multiply", "parameters": PARAMETERS, "strict": True}}


def step(messages: list[Any]) -> Any:
    """The model's next message, and its tool calls done."""
    asked: Any = {"model": "policy", "messages": messages, "tools": [MULTIPLY]}
    if STREAM:
        with client.chat.completions.stream(**asked) as events:
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    messages.append(message.to_dict())
    for call in message.tool_calls or ():
        numbers = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] * numbers["b"])})
    return message


client, conversation = OpenAI(default_headers=HEADERS), list[Any]()
for question in QUESTIONS:
    conversation.append({"role": "user", "content": question})
    while (said := step(conversation)).tool_calls:
        pass
    print(said.content)
