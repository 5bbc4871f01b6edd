"""The agent of demo_agent.py over Anthropic's API, without any client: it posts to /v1/messages."""

import json
import os
import urllib.request

import demo_agent


def answer(a: int, b: int) -> str:
    """Ask the model; everything about the endpoint comes from the environment."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": f"What is {a}+{b}? Answer with just the number."}],
        "max_tokens": 16,
        "temperature": 1,
    }
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/messages",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        message = json.load(response)
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


if __name__ == "__main__":
    demo_agent.main(answer)
