"""An agent in each framework, run unchanged through the proxy in front of a played model: `make test-frameworks`.

Each run is asked for two products in one conversation, and multiplies with a tool. Its rollout is named by headers,
by the base URL (streamed), by an API key, or not at all: two such runs at the same time, one of them streamed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from traffic.server import app, config_of, serving

from frameworks.agent_runs import TASK, Calculator, plan, stored, told
from support.clients import command_for
from support.served import proxy_of

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(900)  # on a machine that has to bring the packages first


PROGRAMS = [str(path.relative_to(HERE)) for path in sorted([*HERE.glob("with_*.py"), *HERE.glob("js/with_*.mjs")])]
WITH_A_CHOICE = ("with_openai_agents.py", "with_agent_framework.py")  # of the API


def case(program: str, api: str) -> Any:
    """A case that shares a process with those that install into the same directory."""
    return pytest.param(program, api, marks=pytest.mark.xdist_group("js" if program.endswith("mjs") else program))


@pytest.mark.parametrize(
    ("program", "api"), [*(case(one, "responses") for one in PROGRAMS), *(case(one, "chat") for one in WITH_A_CHOICE)]
)
async def test_an_agent_of_this_framework(program: str, api: str, tmp_path: Path) -> None:
    model, command = Calculator(), ["env", f"API={api}", *command_for(HERE / program)]
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
    asked_by = {shown: [one for one in bodies if one.get("max_tokens") != 1] for shown, bodies in model.asked.items()}
    recorded = [call for rollout in rollouts.values() for call in rollout["calls"]]
    unnamed = [rollout for name, rollout in rollouts.items() if name not in {run.rollout for run in runs}]
    assert [call["status"] for call in recorded] == ["ok"] * sum(map(len, asked_by.values()))
    for run in runs:
        asked = asked_by[run.shown]
        if run.rollout:
            rollout = rollouts[run.rollout]
            assert (rollout["task_id"], len(rollout["calls"]), told(rollout)) == (TASK, len(asked), run.products)
            assert any(body.get("stream") for body in asked) == (run.stream or program == "with_claude_agent_sdk.py")
    assert sorted(map(told, unnamed)) == sorted(run.products for run in runs if not run.rollout)
