"""An agent in each framework, run unchanged through the proxy in front of a played model: `make test-frameworks`.

Each run is asked for two products in one conversation, and multiplies with a tool. Its rollout is named by headers,
by the base URL (streamed), by an API key, or not at all: two such runs at the same time, one of them streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from traffic.server import app, config_of, serving

from frameworks.agent_runs import TASK, Calculator, dictating, plan, stored, told
from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from support.clients import command_for
from support.models import TEMPLATE
from support.served import own_vllm, proxy_of

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(900)  # on a machine that has to bring the packages first


@dataclass(frozen=True)
class Framework:
    """`api`: of a program that has a choice; `on_vllm`: also in front of a real vLLM."""

    program: str
    api: str = "responses"
    always_streams: bool = False
    on_vllm: bool = False

    @property
    def id(self) -> str:
        return self.program if self.api == "responses" else f"{self.program} {self.api}"

    @property
    def command(self) -> list[str]:
        return ["env", f"API={self.api}", *command_for(HERE / self.program)]


FRAMEWORKS = [
    Framework("with_openai.py"),
    Framework("with_openai_responses.py", on_vllm=True),
    Framework("js/with_openai.mjs", on_vllm=True),
    Framework("with_anthropic.py"),
    Framework("with_langchain.py", on_vllm=True),
    Framework("with_openai_agents.py", on_vllm=True),
    Framework("with_openai_agents.py", "chat", on_vllm=True),
    Framework("with_autogen.py"),
    Framework("with_ag2.py"),
    Framework("with_crewai.py"),
    Framework("with_agent_framework.py", on_vllm=True),
    Framework("with_agent_framework.py", "chat"),
    Framework("with_claude_agent_sdk.py", always_streams=True),
    Framework("with_pydantic_ai.py", on_vllm=True),
    Framework("with_smolagents.py"),
    Framework("js/with_ai_sdk.mjs"),
]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.id)
async def test_an_agent_of_this_framework(framework: Framework, tmp_path: Path) -> None:
    model, command = Calculator(), framework.command
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
            assert any(body.get("stream") for body in asked) == (run.stream or framework.always_streams)
    assert sorted(map(told, unnamed)) == sorted(run.products for run in runs if not run.rollout)


def test_every_program_is_run() -> None:
    programs = {str(path.relative_to(HERE)) for path in [*HERE.glob("with_*.py"), *HERE.glob("js/with_*.mjs")]}
    assert programs == {framework.program for framework in FRAMEWORKS}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The root URL of a real vLLM that knows tools."""
    with own_vllm(tmp_path_factory.mktemp("vllm"), prepare_model(cache_directory()), TEMPLATE) as url:
        yield url.removesuffix("/v1")


@pytest.mark.vllm
@pytest.mark.parametrize("framework", [one for one in FRAMEWORKS if one.on_vllm], ids=lambda framework: framework.id)
async def test_an_agent_of_this_framework_can_be_trained_on(framework: Framework, vllm: str, tmp_path: Path) -> None:
    """In front of a real vLLM with dictated answers: every token recorded, every rollout one row."""
    async with dictating(vllm) as (dictated, upstream):
        config = config_of(upstream, tmp_path)
        exact = {"policy": config.policy.model_copy(update={"token_continuity": "exact"})}
        async with (
            proxy_of(config.model_copy(update=exact)) as proxy,
            aiohttp.ClientSession(proxy) as session,
        ):
            runs = (await plan(proxy, session))[:2]
            for n, run in enumerate(runs):
                await run(framework.command, tmp_path / f"home-{n}")
            rollouts = await stored(session)
    for run in runs:
        calls = rollouts[str(run.rollout)]["calls"]
        assert len(calls) == len(dictated.asked[run.shown]) == 4
        assert [call["untrainable_reason"] for call in calls] == [None] * 4
        for call, later in pairwise(calls):
            seen = [*call["prompt_token_ids"], *call["response_token_ids"]]
            assert later["prompt_token_ids"][: len(seen)] == seen
        assert told(rollouts[str(run.rollout)]) == run.products
