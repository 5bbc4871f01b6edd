"""`export` of transitions, and of conversations that `datasets` loads and a template shows; `import` of others'."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from contract.scripted import said, told, user
from contract.system import Json, Proxy, in_this_process, ok
from lightning_proxy.commands.export.export import conversations
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.records import ModelCall, Rollout
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import CallCredit
from support.calls import call
from support.models import TEMPLATE, save_small_model

SYSTEM, ASKED, SUM, SAID = "You are exact.", "What is 2 + 3?", "5", "It is 5."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": ADD}
OTHER = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALLS = {"id": "k1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":3}'}}
SAME = ("chat", "messages", "items", "previous")


def converse(proxy: Proxy) -> None:
    """The same conversation in each way, and two without calls of a tool."""

    def turns(name: str, route: str, body: Json, then: Callable[[Any], Json]) -> None:
        """Ask, and again with what the answer adds to the request."""
        path, body = f"/rollouts/{name}/v1/{route}", {"model": "policy"} | body
        answer = proxy.post(path, body).json
        assert proxy.post(path, body | then(answer)).status == 200

    calls, last = said(None, tool_calls=[CALLS]), said(SAID)
    proxy.vllm.answer = lambda body: last if body["messages"][-1]["role"] == "tool" else calls
    asked = [{"role": "developer", "content": SYSTEM}, user([{"type": "text", "text": ASKED}])]
    resent = [said("", tool_calls=[CALLS | {"id": "other"}]), told("other", SUM)]
    turns("chat", "chat/completions", {"tools": [TOOL], "messages": asked}, lambda _: {"messages": asked + resent})
    result = {"type": "tool_result", "tool_use_id": "k1", "content": [{"type": "text", "text": SUM}]}
    cached = user([{"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}])
    body = {
        "max_tokens": 50, "system": [{"type": "text", "text": SYSTEM}], "messages": [cached],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    }  # fmt: skip
    turns("messages", "messages", body, lambda one: {"messages": [user(ASKED), said(one["content"]), user([result])]})
    body = {"instructions": SYSTEM, "tools": [{"type": "function"} | ADD], "input": ASKED}
    output = {"type": "function_call_output", "call_id": "k1", "output": SUM}
    turns("items", "responses", body, lambda one: {"input": [user(ASKED), *one["output"], output]})
    turns("previous", "responses", body, lambda one: {"previous_response_id": one["id"], "input": [output]})
    proxy.vllm.answer = lambda _: said("Good day.")
    proxy.chat("another", tools=[OTHER])
    proxy.chat("plain/tasks/t1")
    for name in (*SAME, "another", "plain"):
        proxy.reward(name, 1.0)


def test_every_api_gives_the_same_whole_row_which_is_shown_once_loaded_and_put_into_a_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with in_this_process(tmp_path) as proxy:
        converse(proxy)
        done = ok(proxy.run("export", "-", "--kind", "sft"))
        ok(proxy.run("export", tmp_path / "rows.parquet", "--kind", "sft"))
        shown = [proxy.run("rollouts", "show", name).stdout for name in SAME]
    for text in shown:
        lines = re.findall("(?m)^ *(system|user|assistant|calls|called|tool) +(.*?) *$", text)
        assert lines == [("system", SYSTEM), ("user", ASKED), lines[2], ("tool", SUM), ("assistant", SAID)]
        assert lines[2][0] == "calls" and "add(" in lines[2][1]
    rows = {row["rollout_id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(rows) == done.stdout.count("\n") == 6 and "not exported" not in done.stderr, "a conversation is one row"
    for name in SAME:
        (call,) = rows[name]["messages"][2]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
        assert rows[name]["messages"] == [
            {"role": "system", "content": SYSTEM}, user(ASKED), said("", tool_calls=[call]), told(call["id"], SUM),
            said(SAID),
        ]  # fmt: skip
        facts = ("tools", "task_id", "mode", "status", "reward", "model")
        assert [rows[name][fact] for fact in facts] == [[TOOL], None, "train", "completed", 1.0, "base"]
    assert (rows["plain"]["tools"], rows["plain"]["task_id"]) == (None, "t1")

    file, cache = str(tmp_path / "rows.parquet"), str(tmp_path / "cache")
    loaded = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=cache)
    show = AutoTokenizer.from_pretrained(save_small_model(tmp_path / "model")).apply_chat_template
    texts = {
        row["rollout_id"]: show(row["messages"], tools=row["tools"], chat_template=TEMPLATE.strip(), tokenize=False)
        for row in loaded
    }
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' in texts["chat"]
    assert [texts["chat"].count(text) for text in (SYSTEM, ASKED, SAID, '"description": "Adds."')] == [1, 1, 1, 1]
    assert {texts[name] for name in SAME} == {texts["chat"]} and len(texts) == 6
    assert "null" not in "".join(texts.values()), "no row has the empty fields of another"


def asked(request: Json, response: Json, endpoint: str) -> ModelCall:
    return call("c", request=request, response=response, endpoint=endpoint)


def rows(*calls: ModelCall) -> tuple[list[list[Json]], Counter[str]]:
    left_out: Counter[str] = Counter()
    rollout = Rollout("r", None, None, "train", "completed", None, {}, None, None, 0.0, None)
    return [row["messages"] for row in conversations(rollout, calls, left_out)], left_out


def chat(*texts: str, answer: str = "x", name: str = "c", **more: Any) -> ModelCall:
    messages = [(user, said)[i % 2](text) for i, text in enumerate(texts)]
    response = {"choices": [{"message": said(answer)}]}
    return call(name, request={"messages": messages}, response=response, **more)


def texts(found: list[list[Json]]) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in found]


def completion(prompt: Any, text: str) -> ModelCall:
    return asked({"prompt": prompt}, {"choices": [{"text": text}]}, "completions")


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
    assert texts(found) == [["a", "another"], ["a", "x", "b", "x"], ["a", "x", "c", "x"]]
    found, left_out = rows(chat("a", answer="another", name="lost"), chat("a"), chat("a", "x", "b"))
    assert texts(found) == [["a", "x", "b", "x"]]
    assert left_out == {"another attempt was used in place of its last answer": 1}


def test_a_text_that_grows_is_one_conversation() -> None:
    found, left_out = rows(
        completion("Q: 2 + 3?", " Look up."),
        completion(["Q: 2 + 3? Look up.\nFound: 5"], " So 5."),
        completion([1, 2], " no text"),
    )
    (messages,) = found
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    assert "".join(texts(found)[0]) == "Q: 2 + 3? Look up.\nFound: 5 So 5."
    assert left_out == {"the prompt is not a single text": 1}


def test_what_only_the_provider_has_is_left_out_and_said() -> None:
    yes = {"id": "r1", "output": [{"type": "message"} | said("Yes.")]}
    secret = {"type": "reasoning", "encrypted_content": "gAAA", "summary": []}
    searched = {"type": "web_search_call", "id": "w1", "status": "completed"}
    found, left_out = rows(
        asked({"input": "a"}, {**yes, "output": [secret, *yes["output"]]}, "responses"),
        asked({"input": "b", "previous_response_id": "elsewhere"}, yes, "responses"),
        asked({"input": "c", "conversation": "conv_1"}, yes, "responses"),
        asked({"input": "d"}, {**yes, "output": [searched, *yes["output"]]}, "responses"),
        replace(chat("e"), untrainable_reason="redacted"),
    )
    assert texts(found) == [["a", "Yes."]]
    assert sorted(left_out) == [
        "Response with id 'elsewhere' not found in this rollout",
        "an item of type web_search_call cannot be written as chat",
        "redacted",
        "with `conversation`, only the provider has the whole call",
    ]


def test_thoughts_are_where_chat_templates_look_for_them() -> None:
    thinking = [{"type": "thinking", "thinking": "2 + 3"}, {"type": "text", "text": "5"}]
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "2 + 3"}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "5"}]}
    question = {"messages": [user("2 + 3")]}
    for one in (
        asked(question, {"choices": [{"message": said("5", reasoning="2 + 3")}]}, "chat/completions"),
        asked(question, {"content": thinking}, "messages"),
        asked({"input": "2 + 3"}, {"id": "r", "output": [item, text]}, "responses"),
    ):
        (messages,), _ = rows(one)
        assert messages[-1] == said("5", reasoning_content="2 + 3")


def two_turns(proxy: Proxy, name: str) -> None:
    answer = proxy.chat(f"{name}/tasks/t1").json["choices"][0]["message"]
    proxy.chat(f"{name}/tasks/t1", user("hi"), answer, user("go on"))
    proxy.reward(name, 0.5)


def test_transitions_say_how_they_were_trained_and_what_they_took(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with in_this_process(tmp_path) as proxy:
        mine = proxy.post("/rollouts", {"task_id": "t1", "metadata": {"level": 3}}).json[0]["rollout_id"]
        for name in (mine, "untrained"):
            two_turns(proxy, name)

        async def train() -> int:
            credit = [CallCredit(mine, seq, 0.5, advantage, 0, "first") for seq, advantage in enumerate((0.25, -0.25))]
            async with opened(load_config(proxy.config).store) as database:
                return await Store(database).steps.claim([mine], 0, credit=credit)

        step = asyncio.run(train())
        for file in ("t.jsonl", "t.parquet"):
            ok(proxy.run("export", tmp_path / file))
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    names = ("return", "advantage", "step", "metadata")
    assert [[row[name] for name in ("rollout_id", *names)] for row in rows] == [
        *[["untrained", None, None, None, {}]] * 2,
        *([mine, 0.5, advantage, step, {"level": 3}] for advantage in (0.25, -0.25)),
    ]
    for row, same in zip(rows, parquet.read_table(tmp_path / "t.parquet").to_pylist(), strict=True):
        assert abs(time.time() - row["started_at"]) < 60 and row["latency_ms"] > 0
        assert row["usage"]["completion_tokens"] == 2
        assert same.items() >= {name: row[name] for name in (*names[:3], "started_at", "latency_ms")}.items()
        assert [json.loads(same[name]) for name in ("usage", "metadata")] == [row["usage"], row["metadata"]]


def test_a_rollout_that_is_deleted_meanwhile_is_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with in_this_process(tmp_path) as proxy, ThreadPoolExecutor(1) as thread:
        for name in ("first", "second", "third"):
            two_turns(proxy, name)
        proxy.post("/rollouts/large/events", {"kind": "action", "name": "x", "result": "x" * 200_000})
        proxy.post("/rollouts/large/end", {"status": "completed"})
        exporting = thread.submit(proxy.run, "export", tmp_path / "pipe")
        with (tmp_path / "pipe").open() as pipe:  # the newest does not fit: the export waits
            got = pipe.read(1000)
            assert proxy.call("DELETE", "/rollouts/first").status == 204
            got += pipe.read()
        ok(exporting.result())
    assert {json.loads(line)["rollout_id"] for line in got.splitlines()} == {"large", "third", "second"}
    assert (tmp_path / "pipe").is_fifo()


IMPORTED = [
    {
        "messages": [
            user("w4"), said(None, tool_calls=[CALLS | {"function": {"name": "add", "arguments": {"a": 2}}}]),
            told("k1", "w5"), said("w6"),
        ],
        "tools": [TOOL], "task_id": "t1", "model": "gpt-5",
    },
    {"messages": [user("w7"), said("w8")], "reward": 0.25},
    {"messages": [user("w9"), said("w8")], "status": "failed"},
]  # fmt: skip


def test_imported_conversations_are_rollouts_of_another_model(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, IMPORTED)))
    with in_this_process(tmp_path) as proxy:
        refused = proxy.run("import", file, "--reward", "-20000")
        assert refused.returncode != 0 and "outside of rewards.range" in refused.stderr
        assert "3 rollouts imported from " in ok(proxy.run("import", file, "--model", "claude")).stderr
        listed = proxy.get("/rollouts")["data"]
        calls = [call for one in listed for call in proxy.rollout(one["rollout_id"])["calls"]]
    facts = {(one["task_id"], one["status"], one["reward"], one["calls"]) for one in listed}
    assert facts == {("t1", "completed", 1.0, 2), (None, "completed", 0.25, 1), (None, "failed", None, 1)}
    models = {(one["model"], one["policy_version"], one["trainable"]) for one in calls}
    assert models == {("gpt-5", None, False), ("claude", None, False)}
    (tool,) = [tool for one in calls for tool in one["tool_calls"]]
    assert (tool["arguments"], tool["result"]) == ('{"a":2}', "w5")
