"""A program written for Agent Lightning's emitters, of which nothing is changed but its import."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_proxy import client
from lightning_proxy.client import agl

Running = Callable[..., AbstractAsyncContextManager[Any]]

BEFORE, AFTER = "import agentlightning as agl", "from lightning_proxy.client import agl"
PROGRAM = """
import asyncio
import json
import os

import agentlightning as agl
from openai import AsyncOpenAI


@agl.operation
def search(query: str, limit: int = 2) -> list[str]:
    return [f"{query} {i}" for i in range(limit)]


@agl.operation(name="calculate", category="tool")
async def calculate(expression: str) -> int:
    return sum(int(part) for part in expression.split("+"))


@agl.rollout
async def agent(task: dict, llm: agl.LLM) -> None:
    agl.emit_message("planning", attributes={"phase": 1})
    found = search("sums", limit=1)
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=os.environ["OPENAI_API_KEY"])
    answer = await client.chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": task["question"]}], **llm.sampling_parameters
    )
    await client.close()
    agl.emit_object({"found": found, "said": answer.choices[0].message.content})
    agl.emit_reward(0.1)
    with agl.operation(step="check") as op:
        op.set_input(task["question"], strict=True)
        op.set_output({"right": True})
    try:
        await calculate("no number")
    except ValueError as error:
        agl.emit_exception(error)
    agl.emit_annotation({"tags": ["fast"]})
    agl.emit_reward({"correct": 1.0, "format": 0.5}, primary_key="correct")


if __name__ == "__main__":
    llm = agl.LLM(
        endpoint=os.environ["OPENAI_BASE_URL"], model="policy", sampling_parameters={"temperature": 1.0}
    )
    asyncio.run(agent(json.loads(os.environ["LIGHTNING_TASK"]), llm))
"""


async def test_it_runs_and_all_that_it_emits_is_recorded(running: Running, tmp_path: Path) -> None:
    assert PROGRAM.count(BEFORE) == 1
    program, tasks = tmp_path / "agent.py", tmp_path / "tasks.jsonl"
    program.write_text(PROGRAM.replace(BEFORE, AFTER))
    tasks.write_text('{"task_id": "t", "question": "1+1"}\n')
    async with running(tmp_path) as system:
        code, out, err = await system.lightning(
            "run", "--tasks", tasks, "--group-size", "1", "--", sys.executable, program
        )
        assert code == 0, out + err
        _, page = await system.call("GET", "/rollouts")
        (rollout,) = page["data"]
        _, rollout = await system.call("GET", f"/rollouts/{rollout['rollout_id']}")
    assert (rollout["status"], rollout["task_id"], rollout["reward"]) == ("completed", "t", 1.0)
    assert [(r["name"], r["reward"], r["final"]) for r in rollout["rewards"]] == [
        ("reward", 0.1, False),
        ("format", 0.5, False),
        ("reward", 1.0, False),
    ]
    assert [call["request"]["temperature"] for call in rollout["calls"]] == [1.0]
    told = [(event["seq"], event["kind"], event["name"]) for event in rollout["events"]]
    assert told == [
        (0, "note", "message"),
        (0, "action", "search"),
        (1, "note", "object"),
        (1, "action", "operation"),
        (1, "action", "calculate"),
        (1, "note", "exception"),
        (1, "note", "annotation"),
    ]
    message, search, said, check, failed, exception, _ = rollout["events"]
    assert message["value"] == {"value": "planning", "attributes": {"phase": 1}}
    assert (search["arguments"], search["result"]) == ({"query": "sums", "limit": 1}, ["sums 0"])
    assert said["value"]["said"].startswith("by base")
    assert check["arguments"] == {"args": ["1+1"], "strict": True, "attributes": {"step": "check"}}
    assert (check["result"], check["is_error"]) == ({"right": True}, False)
    assert failed["is_error"] and failed["result"].startswith("ValueError: invalid literal")
    assert exception["value"]["exception.type"] == "ValueError"
    assert "calculate" in exception["value"]["exception.stacktrace"]


async def test_a_returned_number_is_the_reward_and_an_exception_fails(running: Running, tmp_path: Path) -> None:
    @agl.rollout
    def graded(task: dict[str, Any], llm: agl.LLM, rollout: Any) -> float:
        assert llm.get_base_url().startswith(rollout.control.url)
        if task["fails"]:
            raise RuntimeError("cannot")
        return np.float32(0.5)  # type: ignore[return-value]

    async with running(tmp_path) as system:

        def run(rollout_id: str, fails: bool) -> Any:
            with client.rollout(rollout_id, url=system.url):
                return graded({"fails": fails})

        assert await asyncio.to_thread(run, "r1", False) == 0.5
        with pytest.raises(RuntimeError, match="cannot"):
            await asyncio.to_thread(run, "r2", True)
        _, one = await system.call("GET", "/rollouts/r1")
        _, two = await system.call("GET", "/rollouts/r2")
    assert (one["status"], one["reward"]) == ("completed", 0.5)
    assert (two["status"], two["reason"]) == ("failed", "RuntimeError: cannot")


MAIN = """
from lightning_proxy.client import agl

@agl.rollout
async def agent(task: dict, llm: agl.LLM) -> float:
    assert llm.model == "policy" and llm.endpoint.endswith("/v1")
    return float(task["worth"])

agent.main()
"""


async def test_main_runs_the_agent_for_the_task_of_its_environment(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        environment = os.environ | {"LIGHTNING_URL": system.url, "LIGHTNING_ROLLOUT_ID": "r1"}
        task = {"LIGHTNING_TASK": '{"worth": 0.75}'}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", MAIN, env=environment | task)
        assert await process.wait() == 0
        _, rollout = await system.call("GET", "/rollouts/r1")
        alone = await asyncio.create_subprocess_exec(sys.executable, "-c", MAIN, env=environment, stderr=PIPE)
        _, err = await alone.communicate()
    assert (rollout["status"], rollout["reward"]) == ("completed", 0.75)
    assert (alone.returncode, b"start this program by `lightning-proxy run" in err) == (1, True)


def test_what_agent_lightning_refuses_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a number"):
        agl.emit_reward("1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="primary_key"):
        agl.emit_reward({"a": 1.0})
    with pytest.raises(RuntimeError, match="no rollout here"):
        agl.emit_message("to nobody")
    agl.emit_message("kept", propagate=False)


async def test_a_prompt_template_is_the_proxys_prompt(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @agl.prompt_rollout
    def agent(task: Any, prompt_template: agl.PromptTemplate) -> float:
        said.append(prompt_template.format(city=task["city"]))
        return 0.5

    async with running(tmp_path) as system:
        monkeypatch.setenv("LIGHTNING_URL", system.url)
        for text in ("Weather in {city}?", "What is the weather in {city}?"):
            await system.call("POST", "/prompts", {"name": "prompt_template", "text": text, "promote": True})
            await asyncio.to_thread(agent, {"city": "Rome"})
        assert said == ["Weather in Rome?", "What is the weather in Rome?"]
        _, prompt = await system.call("GET", "/prompts/prompt_template")
        assert [one["rewards"]["train"]["mean"] for one in prompt["versions"]] == [0.5, 0.5]


def test_what_cannot_be_run_is_refused_with_the_reason() -> None:
    with pytest.raises(NotImplementedError, match="only functions of task and of llm"):

        @agl.rollout
        def agent(task: Any, resources: Any) -> None: ...

    with pytest.raises(NotImplementedError, match="jinja"):
        agl.PromptTemplate("{{ x }}", engine="jinja").format(x=1)
