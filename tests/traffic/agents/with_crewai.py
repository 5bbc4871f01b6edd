# /// script
# requires-python = ">=3.11"
# dependencies = ["crewai==1.15.30"]
# ///
"""CrewAI: crews of two agents and several tasks, sequential and hierarchical."""

from __future__ import annotations

import logging
import os

os.environ |= {"CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true", "CREWAI_DISABLE_TELEMETRY": "true"}

from crewai import LLM, Agent, Crew, Process, Task
from crewai.tools import tool
from rollouts import Rollout, found, main


@tool("search")
def search(query: str) -> str:
    """Search the archive."""
    return found(query)


def model(rollout: Rollout) -> LLM:
    return LLM("openai/policy", base_url=rollout.url, api_key=rollout.key, default_headers=rollout.headers, timeout=30)


def crew(rollout: Rollout, process: Process) -> Crew:
    api = model(rollout)
    analyst = Agent(
        role="Analyst", goal="Find facts", backstory="You know the archives.", tools=[search], llm=api, max_iter=5
    )
    writer = Agent(role="Writer", goal="Write well", backstory="You wrote for newspapers.", llm=api, max_iter=5)
    tasks = [
        Task(description=rollout.task, expected_output="The facts.", agent=analyst),
        Task(description="Write an article of what was found.", expected_output="An article.", agent=writer),
        Task(description="Give the article a headline.", expected_output="A headline.", agent=writer),
    ]
    lead = {"manager_llm": api} if process is Process.hierarchical else {}
    return Crew(agents=[analyst, writer], tasks=tasks, process=process, **lead)


async def sequential(rollout: Rollout) -> None:
    await crew(rollout, Process.sequential).kickoff_async()


async def hierarchical(rollout: Rollout) -> None:
    await crew(rollout, Process.hierarchical).kickoff_async()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    scenarios = [sequential, hierarchical]
    main({f"crewai-{s.__name__}": s for s in scenarios}, "crewai")
