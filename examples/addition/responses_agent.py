"""The agent of demo_agent.py over OpenAI's Responses API, streamed."""

import demo_agent
from openai import OpenAI


def answer(a: int, b: int) -> str:
    """Ask the model; everything about the endpoint comes from the environment."""
    events = OpenAI().responses.create(
        model="policy",
        input=f"What is {a}+{b}? Answer with just the number.",
        max_output_tokens=16,
        temperature=1,
        stream=True,
    )
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


if __name__ == "__main__":
    demo_agent.main(answer)
