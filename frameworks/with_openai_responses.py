# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""OpenAI's client for Python with the Responses API, without a framework: a loop that calls tools."""

import json
from typing import Any

from asked import HEADERS, QUESTIONS, STREAM
from openai import OpenAI

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False}
MULTIPLY: Any = {"type": "function", "name": "multiply", "parameters": PARAMETERS, "strict": True}


def step(items: list[Any]) -> str:
    """What the model says next, and its tool calls done."""
    asked: Any = {"model": "policy", "input": items, "tools": [MULTIPLY]}
    if STREAM:
        with client.responses.stream(**asked) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**asked)
    for item in response.output:
        items.append(item.to_dict())
        if item.type == "function_call":
            numbers = json.loads(item.arguments)
            output = str(numbers["a"] * numbers["b"])
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    return str(response.output_text)


client, conversation = OpenAI(default_headers=HEADERS), list[Any]()
for question in QUESTIONS:
    conversation.append({"role": "user", "content": question})
    while not (said := step(conversation)):
        pass
    print(said)
