"""Versioned prompts take the place of an agent's own; rollouts keep theirs, and the record has both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.prompts.proxy import find, put, text_at

OWN = "You are a writer."
BETTER = "You are a careful writer. Count your words."
BLOCK = {"type": "text", "text": "be brief"}
USER = {"role": "user", "content": "hi"}
SYSTEM, DEVELOPER = {"role": "system", "content": "be brief"}, {"role": "developer", "content": [BLOCK]}
INPUT = {"role": "developer", "content": [BLOCK | {"type": "input_text"}]}


@pytest.mark.parametrize(
    ("endpoint", "request_", "role", "place"),
    [
        ("chat/completions", {"messages": [SYSTEM, USER]}, "system", ("messages", 0, "content")),
        ("chat/completions", {"messages": [USER, DEVELOPER]}, "system", ("messages", 1, "content", 0, "text")),
        ("chat/completions", {"messages": [SYSTEM | {"content": [BLOCK, BLOCK]}]}, "system", None),
        ("chat/completions", {"messages": [USER]}, "system", None),
        ("chat/completions", {"messages": "hi"}, "user", None),
        ("chat/completions", {"messages": ["hi", USER | {"content": "be brief"}]}, "user", ("messages", 1, "content")),
        ("messages", {"system": "be brief", "messages": [USER]}, "system", ("system",)),
        ("messages", {"system": [BLOCK], "messages": [USER]}, "system", ("system", 0, "text")),
        ("responses", {"instructions": "be brief", "input": "hi"}, "system", ("instructions",)),
        ("responses", {"input": [INPUT]}, "system", ("input", 0, "content", 0, "text")),
        ("responses", {"input": "be brief"}, "user", ("input",)),
        ("responses", {"previous_response_id": "r", "input": "be brief"}, "user", None),
        ("completions", {"prompt": "be brief"}, "user", ("prompt",)),
        ("completions", {"prompt": [1, 2]}, "user", None),
    ],
)  # fmt: skip
def test_a_prompt_is_found_and_replaced(endpoint: str, request_: Any, role: Any, place: Any) -> None:
    assert find(endpoint, request_, role) == place
    if place is not None:
        before = repr(request_)
        assert text_at(request_, place) == "be brief"
        changed = put(request_, place, "be long")
        assert text_at(changed, place) == "be long" and put(changed, place, "be brief") == request_
        assert repr(request_) == before


async def ask(system: Any, text: str = OWN, *more: Any, **headers: str) -> str:
    """A call with this system prompt; returns its rollout."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "write"}, *more]
    body = {"model": "policy", "messages": messages}
    async with system.session.post(f"{system.url}/v1/chat/completions", json=body, headers=headers) as answer:
        return str(answer.headers["X-Rollout-Id"])


async def add(system: Any, text: str, **more: Any) -> None:
    await system.post("/prompts", {"name": "writer", "text": text, **more})


async def test_calls_are_shown_the_version_that_their_rollout_began_with(start: Any) -> None:
    async with start() as system:

        def seen() -> list[str]:
            return [asked["messages"][0]["content"] for asked in system.vllm.requests]

        before, after = ({"X-Agent-Name": "writer", "X-Rollout-Id": one} for one in ("before", "after"))
        await ask(system, **before)
        await add(system, OWN, match={"agent": "writer"})
        await add(system, BETTER, promote=True)
        await asyncio.sleep(0.6)
        await ask(system, **before)
        await ask(system, **after)
        assert seen() == [OWN, OWN, BETTER], "what began before there was a prompt goes on as it began"
        system.vllm.answer = lambda _: {"role": "assistant", "content": "an answer"}
        unnamed = await ask(system)  # matched by the agent's own text
        said = {"role": "assistant", "content": "an answer"}
        assert await ask(system, OWN, said, {"role": "user", "content": "again"}) == unnamed
        await ask(system, "You are somebody else.")
        assert seen()[3:] == [BETTER, BETTER, "You are somebody else."]
        detail = await system.get(f"/rollouts/{unnamed}")
        assert [one["sent"] for one in detail["prompts"]] == [OWN, OWN]


async def test_a_prompt_tells_and_binds_nothing_of_another_keys_rollouts(start: Any) -> None:
    async with start() as system:
        await add(system, OWN, match={"agent": "writer"})
        ann, bob = [await system.key(name, scope="own") for name in ("ann", "bob")]
        (opened,) = await system.post("/rollouts", {}, **ann)
        theirs = {"X-Rollout-Id": opened["rollout_id"]}
        assert (await system.call("GET", "/prompts/writer", **bob, **theirs))[0] == 404
        async with system.store() as store:
            assert await store.database.all("SELECT * FROM rollout_prompts") == []
        await system.get("/prompts/writer", **ann, **theirs)
        await system.post("/reward", {"rollout_id": opened["rollout_id"], "reward": 0.5}, **ann)
        seen = [(await system.get("/prompts/writer", **key))["versions"][0]["rewards"] for key in (ann, bob)]
        assert seen == [{"train": {"mean": 0.5, "rollouts": 1}}, {}]


@pytest.mark.sqlite
@pytest.mark.parametrize("redact", [{"patterns": ["zebra"]}, {"fields": ["request.messages.*.content"]}])
async def test_what_the_agent_sent_is_redacted_and_goes_with_its_rollout(start: Any, redact: Any) -> None:
    async with start(recording={"redact": redact}) as system:
        await add(system, OWN, match={"agent": "writer"})
        await ask(system, "the zebra's own", **{"X-Rollout-Id": "r1", "X-Agent-Name": "writer"})
        detail = await system.get("/rollouts/r1")
        (placed,) = detail["prompts"]
        assert "zebra" not in str(detail) and ("own" in placed["sent"]) == ("patterns" in redact)
        await system.post("/rollouts/r1/end", {"status": "discarded"})
        assert (await system.call("DELETE", "/rollouts/r1"))[0] == 204
        rows = "SELECT * FROM call_prompts UNION ALL SELECT *, 1, 1, 1 FROM rollout_prompts"
        async with system.store() as store:
            assert await store.database.all(rows) == []


async def test_prompts_are_added_shown_and_promoted_by_commands(start: Any, tmp_path: Path) -> None:
    own, better = tmp_path / "own.txt", tmp_path / "better.txt"
    own.write_text("Be brief.\nBe kind.")
    better.write_text("Be brief.\nBe exact.")
    async with start() as system:
        for words, said in (
            ("list", "no prompts yet: `lightning-proxy prompts add NAME FILE` adds the first one"),
            (f"add writer {own} --agent writer", "prompt writer version 1; it is live"),
            (f"add writer {better} --comment exact", "prompt writer version 2; 1 is live"),
            ("show writer --version 2", "Be brief.\nBe exact."),
            ("promote writer 2", "prompt writer version 2 is live"),
        ):  # fmt: skip
            assert (await system.lightning("prompts", *words.split())).stdout == f"{said}\n"
        shown = (await system.lightning("prompts", "list")).stdout.splitlines()
        assert [line.split()[:3] for line in shown[1:]] == [["writer", "1", "writer"], ["writer", "2", "*"]]
        back = await system.lightning("prompts", "rollback", "writer")
        assert back.stdout == "prompt writer version 1 is live\n"
        missing = await system.lightning("prompts", "show", "nobody")
        assert (missing.returncode, "no prompt 'nobody'" in missing.stderr) == (1, True)


HOSTILE = "<img src=x onerror=window.hurt=1>"


@pytest.mark.feature("page")
async def test_the_page_shows_versions_with_their_rewards_and_what_differs(start: Any, tmp_path: Path) -> None:
    from support.views import drawn  # reads the page

    async with start() as system:
        await add(system, f"{OWN}\n{HOSTILE}", match={"agent": "writer"})
        better = f"{OWN}\nCount your words. {HOSTILE}"
        await add(system, better, parent=1, comment=HOSTILE, metrics={HOSTILE: 0.5})
        (opened,) = await system.post("/rollouts", {"task_id": "t1", "prompts": {"writer": 2}})
        await system.post("/reward", {"rollout_id": opened["rollout_id"], "reward": 0.75})
        listed, version = await drawn(system, tmp_path, "prompts", "prompts/writer/2")
    assert "version 20.75 of 1" in listed["text"] and "version 1live" in listed["text"]
    assert {"del", "ins"} <= {*version["tags"]} and "img" not in version["tags"]
    assert f"{better}\n" in version["text"] and f"comment{HOSTILE}" in version["text"]
