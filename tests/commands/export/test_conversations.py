"""`export --kind sft`: one whole row a conversation, in every API, that `datasets` loads and a chat template shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.export.export import conversations
from lightning_proxy.core.records import ModelCall, Rollout
from support.models import TEMPLATE

Running = Callable[..., AbstractAsyncContextManager[Any]]
Json = dict[str, Any]

SYSTEM, ASKED, SUM, SAID = "You are exact.", "What is 2 + 3?", "5", "It is 5."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALLS = {"id": "k1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":3}'}}


def policy(body: Json) -> Json:
    """Calls the tool, then says what it returned."""
    if body["messages"][-1]["role"] == "tool":
        return {"role": "assistant", "content": SAID}
    return {"role": "assistant", "content": None, "tool_calls": [CALLS]}


async def by_chat(system: Any, url: str) -> None:
    messages = [
        {"role": "developer", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": ASKED}]},
    ]
    body = {"model": "policy", "tools": [TOOL]}
    _, answer = await system.call("POST", f"{url}/chat/completions", {**body, "messages": messages})
    sent_back = {**answer["choices"][0]["message"], "content": "", "tool_calls": [{**CALLS, "id": "other"}]}
    messages += [sent_back, {"role": "tool", "tool_call_id": "other", "content": SUM}]
    await system.call("POST", f"{url}/chat/completions", {**body, "messages": messages})


async def by_messages(system: Any, url: str) -> None:
    body = {"model": "policy", "max_tokens": 50, "system": [{"type": "text", "text": SYSTEM}]}
    body["tools"] = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": [{"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}]}]
    _, answer = await system.call("POST", f"{url}/messages", {**body, "messages": messages})
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": answer["content"]}]
    result = {"type": "tool_result", "tool_use_id": "k1", "content": [{"type": "text", "text": SUM}]}
    messages += [{"role": "user", "content": [result]}]
    await system.call("POST", f"{url}/messages", {**body, "messages": messages})


async def by_responses(system: Any, url: str, *, resent: bool) -> None:
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
    body = {"model": "policy", "instructions": SYSTEM, "tools": [tool]}
    _, answer = await system.call("POST", f"{url}/responses", {**body, "input": ASKED})
    more: list[Json] = [{"type": "function_call_output", "call_id": "k1", "output": SUM}]
    if resent:
        body["input"] = [{"role": "user", "content": ASKED}, *answer["output"], *more]
    else:
        body |= {"previous_response_id": answer["id"], "input": more}
    await system.call("POST", f"{url}/responses", body)


async def converse(system: Any) -> None:
    """The same conversation in each way, and one without tools."""
    system.vllm.answer = policy
    await by_chat(system, "/rollouts/chat/v1")
    await by_messages(system, "/rollouts/messages/v1")
    await by_responses(system, "/rollouts/items/v1", resent=True)
    await by_responses(system, "/rollouts/previous/v1", resent=False)
    system.vllm.answer = lambda body: {"role": "assistant", "content": "Good day."}
    body = {"model": "policy", "tools": [OTHER], "messages": [{"role": "user", "content": "Hello"}]}
    await system.call("POST", "/rollouts/another/v1/chat/completions", body)
    await system.chat("plain", X_Task_Id="t1")
    for name in ("chat", "messages", "items", "previous", "another", "plain"):
        await system.call("POST", "/reward", {"rollout_id": name, "reward": 1.0})


def exported(rows: list[Json]) -> dict[str, Json]:
    assert len({row["rollout_id"] for row in rows}) == len(rows) == 6, "a conversation is one row"
    return {row["rollout_id"]: row for row in rows}


async def test_every_api_gives_the_same_whole_row_and_is_shown_once(running: Running, tmp_path: Path) -> None:
    names = ("chat", "messages", "items", "previous")
    async with running(tmp_path) as system:
        await converse(system)
        code, out, err = await system.lightning("export", "-", "--kind", "sft")
        assert (code, "left out" in err) == (0, False), err
        shown = {name: (await system.lightning("rollouts", "show", name))[1] for name in names}
    rows = exported([json.loads(line) for line in out.splitlines()])
    for name in names:
        lines = [line.split(maxsplit=1) for line in shown[name].splitlines() if line.strip() and "──" not in line]
        roles = ("system", "user", "assistant", "calls", "called", "tool")
        told, texts = zip(*[line for line in lines if line[0] in roles], strict=True)
        assert told == ("system", "user", "calls", "tool", "assistant"), name
        assert (texts[:2], texts[3:]) == ((SYSTEM, ASKED), (SUM, SAID)) and "add(" in texts[2], name
        system_said, user, calls, result, last = rows[name]["messages"]
        assert system_said == {"role": "system", "content": SYSTEM}
        assert user == {"role": "user", "content": ASKED}
        (call,) = calls["tool_calls"]
        assert (calls["role"], calls["content"]) == ("assistant", "")
        assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
        assert result == {"role": "tool", "tool_call_id": call["id"], "content": SUM}
        assert last == {"role": "assistant", "content": SAID}
        assert rows[name]["tools"] == [TOOL]
        facts = ("task_id", "mode", "status", "reward", "model")
        assert [rows[name][fact] for fact in facts] == [None, "train", "completed", 1.0, "base"]
    assert (rows["plain"]["tools"], rows["plain"]["task_id"]) == (None, "t1")


async def test_rows_are_loaded_and_shown_by_a_chat_template(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    from support.models import save_small_model

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    async with running(tmp_path) as system:
        await converse(system)
        assert (await system.lightning("export", tmp_path / "rows.parquet", "--kind", "sft"))[0] == 0
    file = str(tmp_path / "rows.parquet")
    rows = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_small_model(tmp_path / "model"))
    found = exported(list(rows))
    shown = {
        name: tokenizer.apply_chat_template(
            row["messages"], tools=row["tools"], chat_template=TEMPLATE.strip(), tokenize=False
        )
        for name, row in found.items()
    }
    whole = shown["chat"]
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' in whole
    assert [whole.count(text) for text in (SYSTEM, ASKED, SAID, '"description": "Adds."')] == [1, 1, 1, 1]
    assert {shown[name] for name in ("messages", "items", "previous")} == {whole}
    assert "null" not in "".join(shown.values()), "no row has the empty fields of another"


def call(request: Json, response: Json, endpoint: str = "chat/completions", **more: Any) -> ModelCall:
    """A call of any API, answered."""
    blank: Json = dict.fromkeys(ModelCall.__dataclass_fields__)
    facts: Json = {"call_id": "c", "rollout_id": "r", "seq": 0, "status": "ok", "endpoint": endpoint}
    facts |= {"trainable": True, "started_at": 0.0}
    facts |= dict.fromkeys(("policy_versions", "prompt_token_ids", "choices", "tool_calls"), ())
    return ModelCall(**{**blank, **facts, "request": request, "response": response, **more})


def rows(*calls: ModelCall) -> tuple[list[list[Json]], Counter[str]]:
    left_out: Counter[str] = Counter()
    rollout = Rollout("r", None, None, "train", "completed", None, {}, None, None, 0.0, None)
    return [row["messages"] for row in conversations(rollout, calls, left_out)], left_out


def chat(*texts: str, answer: str = "x", **more: Any) -> ModelCall:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return call({"messages": messages}, {"choices": [{"message": {"role": "assistant", "content": answer}}]}, **more)


def completion(prompt: Any, text: str) -> ModelCall:
    return call({"prompt": prompt}, {"choices": [{"text": text}]}, "completions")


def test_only_a_conversation_that_is_gone_on_with_is_left_out() -> None:
    found, _ = rows(
        chat("a"),
        chat("a", answer="another"),  # a second answer to the same question
        chat("a", "x", "b"),
        chat("a", "x", "c", superseded_by="the next"),
        chat("a", "x", "c"),
        chat("a", "x", "c"),  # said again
        chat("a", "x", "c", "x", "d", status="error"),  # nothing came of it
    )
    assert [[m["content"] for m in messages] for messages in found] == [
        ["a", "another"], ["a", "x", "b", "x"], ["a", "x", "c", "x"],
    ]  # fmt: skip


def test_an_attempt_that_was_rejected_is_no_conversation() -> None:
    found, left_out = rows(chat("a", answer="another", call_id="lost"), chat("a"), chat("a", "x", "b"))
    assert [[m["content"] for m in messages] for messages in found] == [["a", "x", "b", "x"]]
    assert left_out == {"another attempt was used in place of its last answer": 1}


def test_a_text_that_grows_is_one_conversation() -> None:
    found, left_out = rows(
        completion("Q: 2 + 3?", " Look up."),
        completion(["Q: 2 + 3? Look up.\nFound: 5"], " So 5."),
        completion([1, 2], " no text"),
    )
    (messages,) = found
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    assert "".join(m["content"] for m in messages) == "Q: 2 + 3? Look up.\nFound: 5 So 5."
    assert left_out == {"a prompt of tokens, or of several texts": 1}


def test_what_only_the_provider_has_is_left_out_and_said() -> None:
    said = {"id": "r1", "output": [{"type": "message", "role": "assistant", "content": "Yes."}]}
    secret = {"type": "reasoning", "encrypted_content": "gAAA", "summary": []}
    searched = {"type": "web_search_call", "id": "w1", "status": "completed"}
    found, left_out = rows(
        call({"input": "a"}, {**said, "output": [secret, *said["output"]]}, "responses"),
        call({"input": "b", "previous_response_id": "elsewhere"}, said, "responses"),
        call({"input": "c", "conversation": "conv_1"}, said, "responses"),
        call({"input": "d"}, {**said, "output": [searched, *said["output"]]}, "responses"),
        replace(chat("e"), untrainable_reason="redacted"),
    )
    assert [[m["content"] for m in messages] for messages in found] == [["a", "Yes."]]
    assert sorted(left_out) == [
        "Response with id 'elsewhere' not found in its rollout",
        "`conversation` refers to what only the provider has",
        "an item of type web_search_call cannot be written as chat",
        "redacted",
    ]


def test_thoughts_are_where_chat_templates_look_for_them() -> None:
    answer = {"role": "assistant", "content": "5", "reasoning": "2 + 3"}
    thinking = [{"type": "thinking", "thinking": "2 + 3"}, {"type": "text", "text": "5"}]
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "2 + 3"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "5"}]}
    asked = {"messages": [{"role": "user", "content": "2 + 3"}]}
    for one in (
        call(asked, {"choices": [{"message": answer}]}),
        call(asked, {"content": thinking}, "messages"),
        call({"input": "2 + 3"}, {"id": "r", "output": [item, said]}, "responses"),
    ):
        (messages,), _ = rows(one)
        assert messages[-1] == {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
