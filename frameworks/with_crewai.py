# /// script
# requires-python = ">=3.11"
# dependencies = ["crewai==1.15.30"]
# ///
"""CrewAI: a crew of one, with a task for each question."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("multiply")
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def crew_with(headers: dict[str, str], questions: list[str], stream: bool = False) -> Crew:
    model = LLM("policy", provider="openai", default_headers=headers, stream=stream)
    clerk = Agent(role="Clerk", goal="Be exact", backstory="You count.", tools=[multiply], llm=model)
    return Crew(
        agents=[clerk], tasks=[Task(description=q, expected_output="A number.", agent=clerk) for q in questions]
    )


def main(headers: dict[str, str], questions: list[str], stream: bool) -> None:
    for done in crew_with(headers, questions, stream).kickoff().tasks_output:
        print(done.raw)


if __name__ == "__main__":
    from asked import HEADERS, QUESTIONS, STREAM

    main(HEADERS, QUESTIONS, STREAM)
