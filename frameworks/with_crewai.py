# /// script
# requires-python = ">=3.11"
# dependencies = ["crewai==1.15.30"]
# ///
"""CrewAI: a crew of one, with a task for each question."""

from asked import HEADERS, QUESTIONS, STREAM
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("multiply")
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


model = LLM("policy", provider="openai", default_headers=HEADERS, stream=STREAM)
clerk = Agent(role="Clerk", goal="Be exact", backstory="You count.", tools=[multiply], llm=model)
tasks = [Task(description=question, expected_output="A number.", agent=clerk) for question in QUESTIONS]
for done in Crew(agents=[clerk], tasks=tasks).kickoff().tasks_output:
    print(done.raw)
