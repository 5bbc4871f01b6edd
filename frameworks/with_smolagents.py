# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents: an agent that calls tools."""

from asked import HEADERS, QUESTIONS, STREAM
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: one of them
        b: the other
    """
    return a * b


model = OpenAIModel("policy", client_kwargs={"default_headers": HEADERS})
agent = ToolCallingAgent([multiply], model, stream_outputs=STREAM)
for question in QUESTIONS:
    print(agent.run(question, reset=False))
