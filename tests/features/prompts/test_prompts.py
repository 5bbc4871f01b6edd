"""Versioned prompts take the place of an agent's own; rollouts keep theirs, and the record has both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Running = Callable[..., AbstractAsyncContextManager[Any]]
OWN = "You are a writer."
BETTER = "You are a careful writer. Count your words."


async def ask(system: Any, text: str = OWN, *more: Any, **headers: str) -> str:
    """A call with this system prompt; returns its rollout."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "write"}, *more]
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"model": "policy", "messages": messages}
    async with system.session.post(f"{system.url}/v1/chat/completions", json=body, headers=names) as answer:
        assert answer.status == 200, await answer.text()
        return str(answer.headers["X-Rollout-Id"])


async def add(system: Any, text: str, **more: Any) -> None:
    status, answer = await system.call("POST", "/prompts", {"name": "writer", "text": text, **more})
    assert status == 200, answer


async def test_calls_are_shown_the_version_that_their_rollout_began_with(running: Running, tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(body: Any) -> dict[str, str]:
        seen.append(body["messages"][0]["content"])
        return {"role": "assistant", "content": f"answer {len(seen)}"}

    async with running(tmp_path) as system:
        system.vllm.answer = answer
        named = {"X_Agent_Name": "writer"}
        await ask(system, X_Rollout_Id="before", **named)
        await add(system, OWN, match={"agent": "writer"})
        await add(system, BETTER, promote=True)
        await asyncio.sleep(0.6)
        await ask(system, X_Rollout_Id="before", **named)
        await ask(system, X_Rollout_Id="after", **named)
        assert seen == [OWN, OWN, BETTER], "what began before there was a prompt goes on as it began"
        seen.clear()
        unnamed = await ask(system)  # matched by the agent's own text
        said = {"role": "assistant", "content": "answer 1"}
        assert await ask(system, OWN, said, {"role": "user", "content": "again"}) == unnamed
        await ask(system, "You are somebody else.")
        assert seen == [BETTER, BETTER, "You are somebody else."]
        _, detail = await system.call("GET", f"/rollouts/{unnamed}")
        assert [one["sent"] for one in detail["prompts"]] == [OWN, OWN]


async def test_a_prompt_tells_and_binds_nothing_of_another_keys_rollouts(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await add(system, OWN, match={"agent": "writer"})
        ann, bob = [await system.key(name, scope="own") for name in ("ann", "bob")]
        _, (opened,) = await system.call("POST", "/rollouts", {}, **ann)
        theirs = {"X-Rollout-Id": opened["rollout_id"]}
        assert (await system.call("GET", "/prompts/writer", **bob, **theirs))[0] == 404
        async with system.store() as store:
            assert await store.database.all("SELECT * FROM rollout_prompts") == []
        assert (await system.call("GET", "/prompts/writer", **ann, **theirs))[0] == 200
        await system.call("POST", "/reward", {"rollout_id": opened["rollout_id"], "reward": 0.5}, **ann)
        seen = [(await system.call("GET", "/prompts/writer", **key))[1]["versions"][0]["rewards"] for key in (ann, bob)]
        assert seen == [{"train": {"mean": 0.5, "rollouts": 1}}, {}]


@pytest.mark.sqlite
@pytest.mark.parametrize("redact", [{"patterns": ["zebra"]}, {"fields": ["request.messages.*.content"]}])
async def test_what_the_agent_sent_is_redacted_and_goes_with_its_rollout(
    running: Running, tmp_path: Path, redact: dict[str, list[str]]
) -> None:
    async with running(tmp_path, recording={"redact": redact}) as system:
        await add(system, OWN, match={"agent": "writer"})
        await ask(system, "the zebra's own", X_Rollout_Id="r1", X_Agent_Name="writer")
        _, detail = await system.call("GET", "/rollouts/r1")
        (placed,) = detail["prompts"]
        assert "zebra" not in str(detail) and ("own" in placed["sent"]) == ("patterns" in redact)
        await system.call("POST", "/rollouts/r1/end", {"status": "discarded"})
        assert (await system.call("DELETE", "/rollouts/r1"))[0] == 204
        rows = "SELECT * FROM call_prompts UNION ALL SELECT *, 1, 1, 1 FROM rollout_prompts"
        async with system.store() as store:
            assert await store.database.all(rows) == []
