# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""OpenAI's client for Python with the Responses API, without a framework: a loop that calls tools."""

import json
from typing import Any

from openai import OpenAI


def client_of(headers: dict[str, str]) -> OpenAI:
    return OpenAI(default_headers=headers)


NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False}
MULTIPLY: Any = {"type": "function", "name": "multiply", "parameters": PARAMETERS, "strict": True}


def step(client: OpenAI, items: list[Any]) -> Any:
    """What the model says next, and its tool calls done."""
    return done(client.responses.create(model="policy", input=items, tools=[MULTIPLY]), items)


def done(response: Any, items: list[Any]) -> Any:
    for item in response.output:
        items.append(item.to_dict())
        if item.type == "function_call":
            numbers = json.loads(item.arguments)
            output = str(numbers["a"] * numbers["b"])
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    return response


def streamed(client: OpenAI, items: list[Any]) -> Any:
    with client.responses.stream(model="policy", input=items, tools=[MULTIPLY]) as stream:
        return done(stream.get_final_response(), items)


def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    client, items = client_of(headers), list[Any]()
    for question in questions:
        items.append({"role": "user", "content": question})
        while not (response := (streamed if stream else step)(client, items)).output_text:
            pass
        print(response.output_text)


if __name__ == "__main__":
    from asked import HEADERS, QUESTIONS, STREAM

    main(HEADERS, QUESTIONS, STREAM)
