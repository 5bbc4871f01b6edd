# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents: an agent that calls tools."""

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: one of them
        b: the other
    """
    return a * b


def agent_with(headers: dict[str, str], stream: bool = False) -> ToolCallingAgent:
    model = OpenAIModel("policy", client_kwargs={"default_headers": headers})
    return ToolCallingAgent([multiply], model, stream_outputs=stream)


def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    agent = agent_with(headers, stream)
    for question in questions:
        print(agent.run(question, reset=False))


if __name__ == "__main__":
    from asked import HEADERS, QUESTIONS, STREAM

    main(HEADERS, QUESTIONS, STREAM)
