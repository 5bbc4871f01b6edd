"""`recording.redact`: what is redacted is nowhere in the store; what the agent and the model see is as it was."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import CHAT, MESSAGES, RESPONSES, Json, Scripted, Wire, said, sampled, scripted, user

pytestmark = pytest.mark.sqlite  # the store's bytes are read
MASK = "[redacted]"
RANDOM = "Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6Tq4XbVnMlKjHgFdSaPoIuYtReWq1Zz2Xx3Cc4Vv5Bb6Nn7Mm8Ll9Kk0JjQ7"
OPENAI = f"sk-proj-{RANDOM[:40]}"
# Each with the part of it that must not be found anywhere.
SECRETS = [
    (f"sk-{RANDOM[:48]}", RANDOM[:48]),
    (f"sk-ant-api03-{RANDOM[:93]}", RANDOM[:93]),
    ("AKIAQ7ZX2KQPLMNOVBTR", "Q7ZX2KQPLMNOVBTR"),
    (f"aws_secret_access_key = {RANDOM[:38]}/Q", RANDOM[:38]),
    (f'"SecretAccessKey": "{RANDOM[5:43]}+Q"', RANDOM[5:43]),
    (f"ghp_{RANDOM[:36]}", RANDOM[:36]),
    (f"github_pat_11AAAAAAA0{RANDOM[:60]}", RANDOM[:60]),
    (f"xoxb-2345678901-2345678901-{RANDOM[:24]}", RANDOM[:24]),
    (f"Authorization: Bearer {RANDOM[:30]}", RANDOM[:30]),
    (f"lpk-agent-{RANDOM[:43]}", RANDOM[:43]),
    (f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{RANDOM[:43]}", RANDOM[:43]),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{RANDOM}\n-----END RSA PRIVATE KEY-----", RANDOM),
]
NO_SECRETS = [
    "sk-" + "word-after-word-" * 20,
    "a risk-assessment-and-mitigation-plan-2024 for the task-force-on-long-words",
    "the bearer of responsibilities and the bearer certificates-of-deposit",
    "sk-learn-is-a-package-with-a-long-name",
    "call_0123456789abcdef0123456789abcdef, toolu_01A09q90qw90lq917835lq9, chatcmpl-tool-0f8c9d",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "what is an AKIA key, and is ghp_ its prefix?",
]


def redacting(directory: Path, **rules: Any) -> AbstractContextManager[Scripted]:
    return scripted(directory, recording={"redact": rules})


def ask(model: Scripted, answer: Any, path: str = CHAT, /, **request: Any) -> Json:
    body = {"model": "m"} | ({} if path == RESPONSES else {"messages": [user("hi")]}) | request
    got = model.ask(path, body, answer)
    return dict(model.proxy.rollout(got.headers["x-rollout-id"])["calls"][-1])


def places(text: str) -> list[tuple[Json, Any]]:
    """Requests and answers with a text in each place where a record may have it."""
    arguments = json.dumps({"command": f"export KEY={text}", "note": f"\n{text}"})
    tool = [{"id": "call_1", "type": "function", "function": {"name": "sh", "arguments": arguments}}]
    return [
        ({"messages": [user(f"use {text}")]}, said("done")),
        ({"messages": [user([{"type": "text", "text": f"it is {text}"}])]}, said("done")),
        ({"messages": [user("hi"), said(None, tool_calls=tool), {"role": "tool", "tool_call_id": "call_1",
                                                                 "content": text}]}, said("done")),
        ({"metadata": {text: 1}}, said("done")),
        ({}, said(text)),
        ({}, said(None, tool_calls=tool)),
        ({}, Wire([f"<html>{text}</html>".encode()], "text/html")),
        ({}, Wire([b'data: {"error": {"message": ' + json.dumps(text).encode() + b"}}\n\n"])),
    ]  # fmt: skip


def stored(model: Scripted) -> bytes:
    """Every byte of the store: the database file, and the log ahead of it."""
    return b"".join(file.read_bytes() for file in sorted(model.proxy.directory.glob("store.db*")))


def test_no_secret_is_in_any_byte_of_the_store(tmp_path: Path) -> None:
    with redacting(tmp_path, secrets=True) as model:
        for secret, _ in SECRETS:
            for i, (request, answer) in enumerate(places(f"(é {secret}\n")):
                model.ask(f"/rollouts/r{i}{CHAT}", {"messages": [user("hi")], "stream": i == 7} | request, answer)
        found = stored(model)
        assert b"chat/completions" in found
        assert [core for _, core in SECRETS if core[:20].encode() in found] == []
        call = ask(model, said("\n".join(NO_SECRETS)), messages=[*map(user, NO_SECRETS)])
        assert [message["content"] for message in call["request"]["messages"]] == NO_SECRETS
        assert call["response"]["choices"][0]["message"]["content"] == "\n".join(NO_SECRETS)


def test_chosen_fields_are_masked_wherever_their_path_leads(tmp_path: Path) -> None:
    fields = ["user", "messages.*.content", "stop.1", "stop.7.content", "temperature", "extra.*.id"]
    with redacting(tmp_path, fields=[f"request.{field}" for field in fields]) as model:
        more = {"stop": ["a", "b"], "extra": {"a": {"id": "1", "n": 1}, "b": 2}, "messages": [user("a"), user([1])]}
        call = ask(model, said("ada"), user="ada", temperature=0.5, **more)
        assert call["request"] == {
            "model": "m", "user": MASK, "temperature": None, "stop": ["a", MASK], "messages": [user(MASK)] * 2,
            "extra": {"a": {"id": MASK, "n": 1}, "b": 2},
        }  # fmt: skip
        assert call["response"]["choices"][0]["message"] == said("ada"), "the answer has no such rule"


def test_tokens_are_kept_where_only_what_no_model_is_shown_was_redacted(tmp_path: Path) -> None:
    asked: list[tuple[Json, str, bool]] = [
        ({"user": "ada", "metadata": {"a": "b"}}, "fine", True), ({"messages": [user("zzz")]}, "fine", False),
        ({}, "zzz", False),
    ]  # fmt: skip
    with redacting(tmp_path, patterns=["zzz"], fields=["request.user", "request.metadata.*"]) as model:
        for request, text, kept in asked:
            call = ask(model, sampled(said(text), [1, 2], [7]), model="policy", **request)
            assert (call["prompt_token_ids"], call["response_token_ids"]) == (([1, 2], [7]) if kept else ([], []))
            assert call["untrainable_reason"] == (None if kept else "redacted") and "zzz" not in json.dumps(call)
        first = ask(model, sampled(said("fine"), [1, 2], [7]), RESPONSES, model="policy", input="zzz")
        more = {"model": "policy", "input": "and?", "previous_response_id": first["response"]["id"]}
        assert ask(model, sampled(said("fine"), [1, 2], [7]), RESPONSES, **more)["prompt_token_ids"] == []


def test_a_number_that_a_model_wrote_for_a_tool_is_looked_at_as_its_text_would_be(tmp_path: Path) -> None:
    """Chat's arguments are text, Anthropic's input a value."""
    with redacting(tmp_path, patterns=[r"\b\d{16}\b"]) as model:
        used = {"type": "tool_use", "id": "t", "name": "pay", "input": {"card": 4111111111111111, "n": [2.5, True]}}
        call = ask(model, [used], MESSAGES, max_tokens=9, seed=4111111111111111)
        hidden = {"card": None, "n": [2.5, True]}
        assert call["response"]["content"] == [used | {"input": hidden}]
        assert json.loads(call["tool_calls"][0]["arguments"]) == hidden
        assert call["request"]["seed"] == 4111111111111111, "what servers count is no text"


def test_every_door_redacts_and_nothing_changes_for_the_agent(tmp_path: Path) -> None:
    name, mail = "Rumpelstiltskin", "ada@example.org"
    with redacting(tmp_path, secrets=True, patterns=[name], fields=["request.user", "metadata.email"]) as model:
        opened = model.proxy.post("/rollouts", {"metadata": {"email": mail, "note": OPENAI}}).json[0]["rollout_id"]
        tool = {"id": "call_1", "type": "function", "function": {"name": "use", "arguments": json.dumps({"k": OPENAI})}}
        message, path = said(name, tool_calls=[tool]), f"/rollouts/{opened}{CHAT}"
        body: Json = {"user": mail, "messages": [user(f"my {OPENAI}")]}
        assert model.ask(path, body, message).json["choices"][0]["message"] == message
        assert (model.asked["messages"], model.asked["user"]) == (body["messages"], mail)
        body["messages"] += [message, {"role": "tool", "tool_call_id": "call_1", "content": f"{OPENAI} is valid"}]
        model.ask(path, body, said("done"))
        model.ask(path, body, said("done"), x_stainless_retry_count="1")
        reward = {"rollout_id": opened, "reward": 1, "comment": f"{name} used {OPENAI}"}
        assert model.proxy.post("/reward", reward).status == 200
        shown = model.proxy.rollout(opened)
        first, second, third = shown["calls"]
        assert second["superseded_by"] == third["call_id"], "redacted requests are compared with redacted ones"
        assert first["tool_calls"][0]["result"] == f"{MASK} is valid"
        assert third["request"]["messages"][0]["content"] == f"my {MASK}"
        assert shown["metadata"] == {"email": MASK, "note": MASK}
        assert shown["rewards"][0]["comment"] == f"{MASK} used {MASK}"
        twice = b'{"model": "m", "messages": "%s", "messages": [{"role": "user", "content": "hi"}]}' % OPENAI.encode()
        with model.script(said("x")) as headers:
            assert model.proxy.post(f"/rollouts/twice{CHAT}", twice, **headers).status == 200
        assert [text for text in (OPENAI, name, mail) if text.encode() in stored(model)] == []
    assert OPENAI.encode() not in stored(model)
