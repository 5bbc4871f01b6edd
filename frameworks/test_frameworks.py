"""An agent in each framework, run unchanged through the proxy in front of a played model: `make test-frameworks`.

Each run is asked for two products in one conversation, and multiplies with a tool. Its rollout is named by headers,
by the base URL (streamed), by an API key, or not at all: two such runs at the same time, one of them streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from traffic.server import app, config_of, serving

from support.agent_runs import TASK, Calculator, multiplications, plan, stored, told
from support.clients import command_for, needs
from support.in_process import proxy_of

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(900)  # on a machine that has to bring the packages first


@dataclass(frozen=True)
class Framework:
    """`program` shows how it is used; `package` is the one whose version counts."""

    title: str
    program: str
    package: str
    always_streams: bool = False


FRAMEWORKS = [
    Framework("OpenAI's client, Python", "with_openai.py", "openai"),
    Framework("OpenAI's client, Python, Responses", "with_openai_responses.py", "openai"),
    Framework("OpenAI's client, JavaScript", "js/with_openai.mjs", "openai"),
    Framework("Anthropic's client, Python", "with_anthropic.py", "anthropic"),
    Framework("LangChain", "with_langchain.py", "langchain"),
    Framework("LangGraph", "with_langgraph.py", "langgraph"),
    Framework("OpenAI Agents SDK, Responses", "with_openai_agents.py", "openai-agents"),
    Framework("OpenAI Agents SDK, chat", "with_openai_agents_chat.py", "openai-agents"),
    Framework("AutoGen", "with_autogen.py", "autogen-agentchat"),
    Framework("AG2", "with_ag2.py", "ag2"),
    Framework("CrewAI", "with_crewai.py", "crewai"),
    Framework("Agent Framework, Responses", "with_agent_framework.py", "agent-framework-core"),
    Framework("Agent Framework, chat", "with_agent_framework_chat.py", "agent-framework-core"),
    Framework("Claude Agent SDK", "with_claude_agent_sdk.py", "claude-agent-sdk", always_streams=True),
    Framework("Pydantic AI", "with_pydantic_ai.py", "pydantic-ai-slim"),
    Framework("smolagents", "with_smolagents.py", "smolagents"),
    Framework("Vercel AI SDK", "js/with_ai_sdk.mjs", "ai"),
]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.program)
async def test_an_agent_of_this_framework(
    framework: Framework, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    program, model = HERE / framework.program, Calculator()
    record_property("framework", framework.title)
    record_property("version", needs(program)[framework.package])
    command = command_for(program)
    async with (
        serving(app(model)) as upstream,
        proxy_of(config_of(upstream, tmp_path)) as proxy,
        aiohttp.ClientSession(proxy) as session,
    ):
        first, *others = runs = await plan(proxy, session)
        await first(command, tmp_path / "home-0")
        await asyncio.gather(*(run(command, tmp_path / f"home-{n}") for n, run in enumerate(others, 1)))
        rollouts = await stored(session)

    # Without the proxy's own questions, by which it gets to know the chat template.
    asked_by = {
        shown: [body for body in bodies if body.get("max_tokens") != 1] for shown, bodies in model.asked.items()
    }
    served = [body for bodies in asked_by.values() for body in bodies]
    recorded = [call for rollout in rollouts.values() for call in rollout["calls"]]
    called = [tool for rollout in rollouts.values() for tool in multiplications(rollout)]
    unnamed = [rollout for name, rollout in rollouts.items() if name not in {run.rollout for run in runs}]
    record_property("calls", f"{len(recorded)} of {len(served)}")
    record_property("tool results", f"{sum(tool['result'] is not None for tool in called)} of {len(called)}")
    record_property("streamed", sum(bool(body.get("stream")) for body in served))
    record_property("unnamed", f"{len(unnamed)} rollouts")

    assert [call["status"] for call in recorded] == ["ok"] * len(served)
    for run in runs:
        asked = asked_by[run.shown]
        if run.rollout:
            rollout = rollouts[run.rollout]
            assert (rollout["task_id"], len(rollout["calls"]), told(rollout)) == (TASK, len(asked), run.products)
            assert any(body.get("stream") for body in asked) == (run.stream or framework.always_streams)
    assert sorted(map(told, unnamed)) == sorted(run.products for run in runs if not run.rollout)


def test_every_program_is_run() -> None:
    programs = {str(path.relative_to(HERE)) for path in [*HERE.glob("with_*.py"), *HERE.glob("js/with_*.mjs")]}
    assert programs == {framework.program for framework in FRAMEWORKS}
