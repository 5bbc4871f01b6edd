"""`recording.redact`: what is redacted is nowhere in the store; what the agent and the model see is as it was."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Json,
    Scripted,
    Wire,
    calls,
    said,
    sampled,
    scripted,
    told,
    user,
)  # fmt: skip

pytestmark = pytest.mark.sqlite  # the store's bytes are read
MASK = "[redacted]"
RANDOM = "Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6Tq4XbVnMlKjHgFdSaPoIuYtReWq1Zz2Xx3Cc4Vv5Bb6Nn7Mm8Ll9Kk0JjQ7"
AWS = "Q7ZX2KQPLMNOVBTR"
OPENAI = f"sk-proj-{RANDOM[:40]}"
# Each with so many letters of RANDOM in the place of X.
SECRETS = {
    "sk-X": 48,
    "sk-ant-api03-X": 93,
    "AKIAX": 0,
    "aws_secret_access_key = X/Q": 38,
    '"SecretAccessKey": "X+Q"': 38,
    "ghp_X": 36,
    "github_pat_11AAAAAAA0X": 60,
    "xoxb-2345678901-2345678901-X": 24,
    "Authorization: Bearer X": 30,
    "lpk-agent-X": 43,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.X": 43,
    "-----BEGIN RSA PRIVATE KEY-----\nX\n-----END RSA PRIVATE KEY-----": 97,
}
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
    used = calls(("call_1", {"command": f"export KEY={text}", "note": f"\n{text}"}))
    return [
        ({"messages": [user(f"use {text}")]}, said("done")),
        ({"messages": [user([{"type": "text", "text": f"it is {text}"}])]}, said("done")),
        ({"messages": [user("hi"), used, told("call_1", text)]}, said("done")),
        ({"metadata": {text: 1}}, said("done")),
        ({}, said(text)),
        ({}, used),
        ({}, Wire([f"<html>{text}</html>".encode()], "text/html")),
        ({}, Wire([f'data: {{"error": {{"message": {json.dumps(text)}}}}}\n\n'.encode()])),
    ]


def stored(model: Scripted) -> bytes:
    """Every byte of the store: the database file, and the log ahead of it."""
    return b"".join(file.read_bytes() for file in sorted(model.proxy.directory.glob("store.db*")))


def redacted_calls(model: Scripted) -> float:
    (count,) = re.findall(rb"^lightning_redacted_calls_total (\S+)$", model.proxy.call("GET", "/metrics").body, re.M)
    return float(count)


def test_no_secret_is_in_any_byte_of_the_store(tmp_path: Path) -> None:
    with redacting(tmp_path, secrets=True) as model:
        for form, size in SECRETS.items():
            secret = form.replace("X", RANDOM[:size] or AWS)
            for i, (request, answer) in enumerate(places(f"(é {secret}\n")):
                model.ask(f"/rollouts/r{i}{CHAT}", {"messages": [user("hi")], "stream": i == 7} | request, answer)
        found = stored(model)
        assert b"chat/completions" in found and RANDOM[:20].encode() not in found and AWS.encode() not in found
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
    asked: list[tuple[Json, str]] = [
        ({"user": "ada", "metadata": {"a": "b"}}, "fine"), ({"messages": [user("zzz")]}, "fine"), ({}, "zzz"),
    ]  # fmt: skip
    with redacting(tmp_path, patterns=["zzz"], fields=["request.user", "request.metadata.*"]) as model:
        before = redacted_calls(model)
        for request, text in asked:
            call = ask(model, sampled(said(text), [1, 2], [7]), model="policy", **request)
            found = (call["prompt_token_ids"], call["response_token_ids"], call["untrainable_reason"])
            assert found == (([1, 2], [7], None) if "user" in request else ([], [], "redacted"))
            assert "zzz" not in json.dumps(call)
        first = ask(model, sampled(said("fine"), [1, 2], [7]), RESPONSES, model="policy", input="zzz")
        more = {"model": "policy", "input": "and?", "previous_response_id": first["response"]["id"]}
        assert ask(model, sampled(said("fine"), [1, 2], [7]), RESPONSES, **more)["prompt_token_ids"] == []
        assert redacted_calls(model) == before + 4


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
        (opened,) = model.proxy.post("/rollouts", {"metadata": {"email": mail, "note": OPENAI}}).json
        message, rollout = calls(("call_1", {"k": OPENAI}), text=name), opened["rollout_id"]
        path, messages = f"/rollouts/{rollout}{CHAT}", [user(f"my {OPENAI}")]
        body = {"user": mail, "messages": messages}
        assert model.ask(path, body, message).json["choices"][0]["message"] == message
        assert (model.asked["messages"], model.asked["user"]) == (messages, mail)
        messages += [message, told("call_1", f"{OPENAI} is valid")]
        model.ask(path, body, said("done"))
        model.ask(path, body, said("done"), x_stainless_retry_count="1")
        model.proxy.reward(rollout, 1, comment=f"{name} used {OPENAI}")
        shown = model.proxy.rollout(rollout)
        first, second, third = shown["calls"]
        assert second["superseded_by"] == third["call_id"], "redacted requests are compared with redacted ones"
        assert first["tool_calls"][0]["result"] == f"{MASK} is valid"
        assert third["request"]["messages"][0]["content"] == f"my {MASK}"
        assert shown["metadata"] == {"email": MASK, "note": MASK}
        assert shown["rewards"][0]["comment"] == f"{MASK} used {MASK}"
        twice = b'{"model": "m", "messages": "%s", "messages": [{"role": "user", "content": "hi"}]}' % OPENAI.encode()
        with model.script(said("x")) as headers:
            assert model.proxy.post(CHAT, twice, **headers).status == 200
        assert [text for text in (OPENAI, name, mail) if text.encode() in stored(model)] == []
    assert OPENAI.encode() not in stored(model)
