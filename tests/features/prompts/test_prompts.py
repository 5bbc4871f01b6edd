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


@pytest.fixture
def seen() -> list[Any]:
    """What the model was shown, call by call."""
    return []


def answering(system: Any, seen: list[Any]) -> None:
    def answer(body: Any) -> dict[str, str]:
        seen.append(body["messages"])
        return {"role": "assistant", "content": f"answer {len(seen)}"}

    system.vllm.answer = answer


async def ask(system: Any, text: str = OWN, *more: Any, path: str = "", **headers: str) -> str:
    """A call with this system prompt; returns its rollout."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "write"}, *more]
    body = {"model": "policy", "messages": messages}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with system.session.post(f"{system.url}{path}/v1/chat/completions", json=body, headers=names) as answer:
        assert answer.status == 200, await answer.text()
        return str(answer.headers["X-Rollout-Id"])


async def add(system: Any, text: str, **more: Any) -> Any:
    status, answer = await system.call("POST", "/prompts", {"name": "writer", "text": text, **more})
    assert status == 200, answer
    return answer


async def test_an_unnamed_conversation_is_matched_by_the_agents_own_text(
    running: Running, tmp_path: Path, seen: list[Any]
) -> None:
    async with running(tmp_path) as system:
        answering(system, seen)
        await add(system, OWN, match={"agent": "writer"})
        await add(system, BETTER, promote=True)
        rollout = await ask(system)
        said = {"role": "assistant", "content": "answer 1"}
        assert await ask(system, OWN, said, {"role": "user", "content": "again"}) == rollout
        await ask(system, "You are somebody else.")
        assert [messages[0]["content"] for messages in seen] == [BETTER, BETTER, "You are somebody else."]
        _, detail = await system.call("GET", f"/rollouts/{rollout}")
        assert [one["sent"] for one in detail["prompts"]] == [OWN, OWN]
        assert detail["calls"][1]["extends"] is None or detail["calls"][1]["extends"] == detail["calls"][0]["call_id"]


async def test_a_rollout_that_began_before_a_prompt_goes_on_as_it_began(
    running: Running, tmp_path: Path, seen: list[Any]
) -> None:
    async with running(tmp_path) as system:
        answering(system, seen)
        await ask(system, X_Rollout_Id="r1", X_Agent_Name="writer")
        await add(system, BETTER, match={"agent": "writer"})
        await asyncio.sleep(0.6)
        await ask(system, X_Rollout_Id="r1", X_Agent_Name="writer")
        await ask(system, X_Rollout_Id="r2", X_Agent_Name="writer")
        assert [messages[0]["content"] for messages in seen] == [OWN, OWN, BETTER]


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


async def test_a_field_that_is_not_kept_is_not_kept_as_a_prompt(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, recording={"redact": {"fields": ["request.messages.*.content"]}}) as system:
        await add(system, OWN, match={"agent": "writer"})
        await ask(system, "the zebra's own", X_Rollout_Id="r1", X_Agent_Name="writer")
        _, detail = await system.call("GET", "/rollouts/r1")
        assert "zebra" not in str(detail) and len(detail["prompts"]) == 1


@pytest.mark.sqlite
async def test_what_the_agent_sent_is_redacted_and_goes_with_its_rollout(
    running: Running, tmp_path: Path, seen: list[Any]
) -> None:
    async with running(tmp_path, recording={"redact": {"patterns": ["zebra"]}}) as system:
        answering(system, seen)
        await add(system, OWN, match={"agent": "writer"})
        await ask(system, "the zebra's own", X_Rollout_Id="r1", X_Agent_Name="writer")
        _, detail = await system.call("GET", "/rollouts/r1")
        assert "zebra" not in detail["prompts"][0]["sent"] and "own" in detail["prompts"][0]["sent"]
        await system.call("POST", "/rollouts/r1/end", {"status": "discarded"})
        assert (await system.call("DELETE", "/rollouts/r1"))[0] == 204
        async with system.store() as store:
            assert (
                await store.database.all("SELECT * FROM call_prompts UNION ALL SELECT *, 1, 1, 1 FROM rollout_prompts")
                == []
            )
