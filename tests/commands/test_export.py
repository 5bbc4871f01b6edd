"""`export` of transitions, and of conversations that `datasets` loads and a template shows; `import` of others'."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightning_proxy.commands.export.export import conversations
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import ModelCall, Rollout
from lightning_proxy.features.tune.lessons import LessonReader
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import CallCredit
from support.command_line import lightning
from support.models import TEMPLATE, save_small_model
from support.sections import TrainerConfig

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


async def test_every_api_gives_the_same_whole_row_which_is_shown_once_loaded_and_put_into_a_chat_template(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    names = ("chat", "messages", "items", "previous")
    async with running(tmp_path) as system:
        await converse(system)
        code, out, err = await system.lightning("export", "-", "--kind", "sft")
        assert (code, "left out" in err) == (0, False), err
        assert (await system.lightning("export", tmp_path / "rows.parquet", "--kind", "sft"))[0] == 0
        shown = {name: (await system.lightning("rollouts", "show", name))[1] for name in names}
    rows = {row["rollout_id"]: row for row in map(json.loads, out.splitlines())}
    assert len(rows) == out.count("\n") == 6, "a conversation is one row"
    for name in names:
        lines = [line.split(maxsplit=1) for line in shown[name].splitlines() if line.strip() and "──" not in line]
        roles = ("system", "user", "assistant", "calls", "called", "tool")
        told, texts = zip(*[line for line in lines if line[0] in roles], strict=True)
        assert told == ("system", "user", "calls", "tool", "assistant"), name
        assert (texts[:2], texts[3:]) == ((SYSTEM, ASKED), (SUM, SAID)) and "add(" in texts[2], name
        (call,) = rows[name]["messages"][2]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
        assert rows[name]["messages"] == [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": SUM},
            {"role": "assistant", "content": SAID},
        ]
        facts = ("tools", "task_id", "mode", "status", "reward", "model")
        assert [rows[name][fact] for fact in facts] == [[TOOL], None, "train", "completed", 1.0, "base"]
    assert (rows["plain"]["tools"], rows["plain"]["task_id"]) == (None, "t1")

    file, cache = str(tmp_path / "rows.parquet"), str(tmp_path / "cache")
    loaded = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=cache)
    show = AutoTokenizer.from_pretrained(save_small_model(tmp_path / "model")).apply_chat_template
    said = {
        row["rollout_id"]: show(row["messages"], tools=row["tools"], chat_template=TEMPLATE.strip(), tokenize=False)
        for row in loaded
    }
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' in said["chat"]
    assert [said["chat"].count(text) for text in (SYSTEM, ASKED, SAID, '"description": "Adds."')] == [1, 1, 1, 1]
    assert {said[name] for name in names} == {said["chat"]} and len(said) == 6
    assert "null" not in "".join(said.values()), "no row has the empty fields of another"


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


async def two_turns(system: Any, rollout_id: str, reward: float, **headers: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        body = {"model": "policy", "messages": messages, "tools": [OTHER]}
        path = f"/rollouts/{rollout_id}/v1/chat/completions"
        _, answer = await system.call("POST", path, body, **headers)
        messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
    await system.call("POST", "/reward", {"rollout_id": rollout_id, "reward": reward})


async def test_transitions_say_how_they_were_trained_and_what_they_took(running: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    async with running(tmp_path) as system:
        _, (opened,) = await system.call("POST", "/rollouts", {"task_id": "t1", "metadata": {"level": 3}})
        for name in (mine := opened["rollout_id"], "untrained"):
            await two_turns(system, name, 0.5, X_Task_Id="t1")
        async with system.store() as store:
            credit = [CallCredit(mine, seq, 0.5, advantage, 0, "first") for seq, advantage in enumerate((0.25, -0.25))]
            step = await store.steps.claim([mine], 0, credit=credit)
        for file in ("t.jsonl", "t.parquet"):
            assert (await system.lightning("export", tmp_path / file))[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    names = ("return", "advantage", "step", "metadata")
    learned, others = ([row for row in rows if (row["rollout_id"] == mine) is is_mine] for is_mine in (True, False))
    assert [[row[name] for name in names] for row in learned] == [[0.5, x, step, {"level": 3}] for x in (0.25, -0.25)]
    assert [[row[name] for name in names] for row in others] == [[None, None, None, {}]] * 2, "it was not trained"
    for row in rows:
        assert abs(time.time() - row["started_at"]) < 60 and row["latency_ms"] > 0
        assert row["usage"]["completion_tokens"] == 2
    for row, same in zip(parquet.read_table(tmp_path / "t.parquet").to_pylist(), rows, strict=True):
        assert row.items() >= {name: same[name] for name in (*names[:3], "started_at", "latency_ms")}.items()
        assert [json.loads(row[name]) for name in ("usage", "metadata")] == [same["usage"], same["metadata"]]


async def test_a_rollout_that_is_deleted_meanwhile_is_left_out(running: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with running(tmp_path) as system:
        for name in ("first", "second", "third"):
            await two_turns(system, name, 1.0)
        await system.call("POST", "/rollouts/large/events", {"kind": "action", "name": "x", "result": "x" * 200_000})
        await system.call("POST", "/rollouts/large/end", {"status": "completed"})
        exporting = asyncio.create_task(system.lightning("export", tmp_path / "pipe"))
        with await asyncio.to_thread((tmp_path / "pipe").open) as pipe:  # the newest does not fit: the export waits
            got = await asyncio.to_thread(pipe.read, 1000)
            assert (await system.call("DELETE", "/rollouts/first"))[0] == 204
            got += await asyncio.to_thread(pipe.read)
        assert (await exporting)[0] == 0
    assert {json.loads(line)["rollout_id"] for line in got.splitlines()} == {"large", "third", "second"}
    assert (tmp_path / "pipe").is_fifo()


WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": "w4"},
        {"role": "assistant", "tool_calls": [CALLS | {"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "tool_call_id": "k1", "content": "w5"},
        {"role": "assistant", "content": "w6"},
    ],
    "tools": [TOOL], "task_id": "t1", "model": "gpt-5",
}  # fmt: skip
PLAIN = {"messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}], "reward": 0.25}


async def test_imported_conversations_are_imitated_answer_by_answer(tmp_path: Path) -> None:
    store, config, file = StoreConfig(url=f"sqlite:///{tmp_path}/s.db"), tmp_path / "c.yaml", tmp_path / "rows.jsonl"
    config.write_text(f"store: {{url: '{store.url}'}}\n")
    failed = {
        "messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w8"}],
        "status": "failed",
    }
    file.write_text("".join(json.dumps(row) + "\n" for row in (WITH_TOOLS, PLAIN, failed)))
    command = ("--config", config, "import", file, "--model", "claude")
    refused = await asyncio.to_thread(lightning, *command, "--reward", "-20000")
    assert refused.returncode != 0 and "outside of rewards.range" in refused.stderr
    code, _, err = await asyncio.to_thread(lightning, *command)
    assert (code, "3 rollouts from " in err) == (0, True), err
    tokenizer = AutoTokenizer.from_pretrained(save_small_model(tmp_path / "model"))
    tokenizer.chat_template = TEMPLATE.strip()
    async with opened(store) as database:
        page, _ = await Store(database).rollouts.page({}, 10)
        facts = {(r.task_id, r.status, r.reward, r.calls) for r in page}
        assert facts == {("t1", "completed", 1.0, 2), (None, "completed", 0.25, 1), (None, "failed", None, 1)}
        calls = [call for rollout in page for call in await Store(database).calls.of(rollout.rollout_id)]
        models = {(one.model, one.policy_version, one.trainable) for one in calls}
        assert models == {("gpt-5", None, False), ("claude", None, False)}
        (tool_call,) = [tool for one in calls for tool in one.tool_calls]
        assert (tool_call.arguments, tool_call.result) == ('{"a":2}', "w5")
        settings = {"settings": TrainerConfig(), "tokenizer": tokenizer, "max_tokens": 512, "vocabulary": None}
        trainer: Any = SimpleNamespace(**settings)
        found = await LessonReader("sft", Store(database), trainer).read()
    assert len(found.rollout_ids) == 2, "nobody imitates what failed"
    assert found.metrics["calls_untokenised"] == 0
    assert all(any(row.mask) for one in found.train for row in one.rows)
