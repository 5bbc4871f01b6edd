"""Small inputs from public reports that must come out right: `tests/cases/`; the README there explains the keys."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from contract.scripted import ASKED, CASES, CHAT, MESSAGES, RESPONSES, Json, Scripted, Wire, results_of

Case = dict[str, Any]
TOP = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def read_cases() -> Iterator[Case]:
    for file in sorted(CASES.glob("*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))
    for line in (CASES / "own.jsonl").read_text(encoding="utf-8").splitlines():
        yield {"path": CHAT} | json.loads(line)


ALL = list(read_cases())


def cases_with(*keys: str, but: str = "none") -> Iterator[Case]:
    """The cases that have these keys, of which one that fails is named."""
    for one in ALL:
        if all(key in one for key in keys) and but not in one:
            print(one["name"])  # pytest shows it where the test fails
            yield one


def wire(case: Case, *more: Json) -> Wire:
    """The answer of a case with a stream, with more events before its last one."""
    *events, last = case["stream"] or [""]
    text = [_piece(event, case["path"]) for event in [*events, *more, last]]
    data = "".join(text).encode()
    pieces = [data[i : i + 1] for i in range(len(data))] if case.get("bytewise") else [one.encode() for one in text]
    kind = case.get("content_type", "text/event-stream")
    gate = threading.Event() if "first_byte_s" in case else None
    return Wire([one for one in pieces if one], kind, breaks=case.get("breaks", False), gate=gate)


def _piece(event: str | Json, path: str) -> str:
    if event == "[DONE]":
        return "data: [DONE]\n\n"
    if isinstance(event, str):
        return event
    if "delta" in event and path == CHAT:
        event = {"choices": [{"index": 0, "finish_reason": None} | event]}
    if path == CHAT and "choices" in event:
        event = TOP | event
    name = f"event: {event['type']}\n" if path != CHAT and "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"


def test_the_agent_gets_an_answers_bytes_and_the_record_what_it_said(model: Scripted) -> None:
    for case in cases_with("path", "stream", but="http_version"):
        name = "policy" if case.get("upstream") == "vllm" else "m"
        body = {"model": name, "stream": case.get("asks_stream", True)} | ASKED[case["path"]] | case.get("request", {})
        url, played = f"/rollouts/{uuid.uuid4().hex}", wire(case)
        _, got, is_whole = model.receive("POST", url + case["path"], body, played)
        (call,) = model.proxy.get(url)["calls"]
        sent = b"".join(played.pieces)
        assert not case.get("clean") or (is_whole and got == sent), got
        assert is_whole is not case.get("broken", not is_whole)
        assert not played.was_held
        assert [text for text in case.get("not_in_answer", ()) if text.encode() in got] == []
        assert {key: model.asked.get(key) for key in case.get("sent", ())} == case.get("sent", {})
        check_record(case, call)
        if call["status"] == "ok" and call["response"].get("choices") != []:
            (made, *_) = model.proxy.get(url + "/transitions")["data"]
            response = call["response"]
            assert made["action"]["message"] == (
                response["choices"][0]["message"] if "choices" in response else response
            )


def check_record(case: Case, call: Json) -> None:
    response, first = call["response"], {}
    if isinstance(response, dict) and response.get("choices"):
        first = response["choices"][0]
    for key in ("usage", "finish_reason", "status", "trainable"):
        assert call[key] == case.get(key, call[key])
    for key in ("output", "content"):
        assert key not in case or response[key] == case[key]
    for key, where in (("message", first.get("message") or {}), ("choice", first)):
        assert {name: where.get(name) for name in case.get(key, ())} == case.get(key, {})
    for key, reason in (("untrainable", "untrainable_reason"), ("error", "error")):
        assert case.get(key, "") in (call[reason] or "")
    held = json.dumps(response, ensure_ascii=False)
    assert [text for text in case.get("holds", ()) if text not in held] == []
    if "tool_calls" in case:
        made = [[tool["id"], tool["name"], _object(tool["arguments"])] for tool in call["tool_calls"]]
        assert made == [[call_id, tool, _object(given)] for call_id, tool, given in case["tool_calls"]]


def _object(arguments: str) -> Any:
    """The arguments, if they are an object, or else their text."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_tool_calls_of_vllms_chat_stream_are_those_of_another_dialects_answer(path: str, model: Scripted) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    for case in cases_with("stream", "tool_calls", but="chat_only"):
        if case["path"] != CHAT:
            continue
        answer = model.ask(path, ASKED[path] | {"model": "policy", "stream": True}, wire(case, usage))
        assert model.asked["path"] == CHAT
        (call,) = model.proxy.rollout(answer.headers["x-rollout-id"])["calls"]
        made = [[tool["name"], _object(tool["arguments"])] for tool in call["tool_calls"]]
        assert made == [[tool, _object(given)] for _, tool, given in case["tool_calls"]]
        for tool, (call_id, *_) in zip(call["tool_calls"], case["tool_calls"], strict=True):
            assert tool["id"] == (call_id or tool["id"]) and tool["id"].encode() in answer.body


def test_a_client_of_http_1_0_gets_an_answer_without_chunks(model: Scripted) -> None:
    for case in cases_with("stream", "http_version"):
        host, port = model.proxy.url.removeprefix("http://").split(":")
        body = json.dumps({"model": "m", "stream": True} | ASKED[case["path"]]).encode()
        with model.script(wire(case)) as headers, socket.create_connection((host, int(port)), 30) as connection:
            head = f"POST {case['path']} HTTP/{case['http_version']}\r\nX-Script: {headers['X_Script']}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            got = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, sent = got.decode().partition("\r\n\r\n")
        assert sent.encode() == b"".join(wire(case).pieces)
        assert "transfer-encoding" not in head and "connection: close" in head


def test_a_request_without_a_body(model: Scripted) -> None:
    for case in cases_with("method", "path"):
        with model.script(Wire([b"{}"], "application/json")) as headers:
            answer = model.proxy.call(case["method"], case["path"], **headers, **case.get("request_headers", {}))
        assert answer.status == case.get("status", 200)
        assert "upstream_path" not in case or model.asked["path"] == case["upstream_path"]


def own(case: Case) -> Case:
    """The case with a text of its own for `%CASE%`."""
    found: Case = json.loads(json.dumps(case).replace("%CASE%", uuid.uuid4().hex))
    return found


def test_what_comes_later_about_a_call_is_in_its_record(model: Scripted) -> None:
    """`null` at the end of a stream: it breaks there. Each in a rollout that is named, and in one that is not."""
    for found in cases_with("first", "later"):
        for prefix in (f"/rollouts/{uuid.uuid4().hex}", ""):
            check_later(own(found), prefix, model)


def check_later(case: Case, prefix: str, model: Scripted) -> None:
    def ask(method: str, path: str, body: Json | None, said: Json | list[Any]) -> str:
        events = said if isinstance(said, list) else [json.dumps(said)]
        breaks, kind = events[-1] is None, "text/event-stream" if isinstance(said, list) else "application/json"
        pieces = [_piece(event, RESPONSES).encode() for event in events if event]
        wire = Wire(pieces, kind, breaks=breaks)
        headers, got, _ = model.receive(method, prefix + path, body and {"model": "m"} | body, wire)
        assert breaks or got == b"".join(pieces)
        return str(headers.get("x-rollout-id", ""))

    rollout = ask("POST", *case["first"])
    assert model.proxy.rollout(rollout)["calls"][0]["status"] in ("incomplete", "error")
    for method, path, said in case["later"]:
        ask(method, path, None, said)
    found = model.proxy.rollout(rollout)
    (call,) = found["calls"]
    response = said if isinstance(said, dict) else said[-1]["response"]
    assert (call["status"], call["response"]) == (case.get("status", "ok"), response)
    check_record(case, call)
    ask("GET", path, None, response | {"output": []})  # asking on changes nothing, and counts nothing again
    assert model.proxy.rollout(rollout) == found


@pytest.mark.parametrize("proxies", [1, 2])
def test_a_tools_result_belongs_to_the_call_that_it_answers(models: list[Scripted], proxies: int) -> None:
    for case in cases_with("turns", "results"):
        rollout = uuid.uuid4().hex
        for i, turn in enumerate(case["turns"]):
            found = models[i % proxies].results(rollout, [turn])
        assert found == case["results"]


def test_an_unnamed_conversation_is_one_rollout_and_no_others(model: Scripted) -> None:
    for case in cases_with("unnamed"):
        assert len({*model.rollouts(own(case)["unnamed"], uuid.uuid4().hex)}) == 1
    for case in cases_with("unnamed_apart"):
        found = model.rollouts(case["unnamed_apart"], uuid.uuid4().hex)
        assert len({*found}) == len(found)
    for case in cases_with("unnamed_pair"):
        key = uuid.uuid4().hex
        asked = [model.rollouts(list(turns), key) for turns in zip(*case["unnamed_pair"], strict=True)]
        first, second = (set(rollouts) for rollouts in zip(*asked, strict=True))
        assert len(first) == len(second) == 1 and first != second, asked


def test_a_file_of_others_is_imported(model: Scripted) -> None:
    for case in cases_with("import_file"):
        file = model.proxy.directory / "theirs.jsonl"
        file.write_text(case["import_file"], encoding="utf-8")
        done = model.proxy.run("import", file)
        assert (done.returncode, f"{case['imported']} rollouts" in done.stderr) == (0, True), done.stderr


def post_spans(model: Scripted, rollout: str, spans: list[Json], first_id: int = 1) -> Json:
    """Post spans in OTLP's JSON, and return their rollout."""

    def value(one: Any) -> Json:
        if isinstance(one, list):
            return {"arrayValue": {"values": [value(each) for each in one]}}
        return {"intValue": str(one)} if isinstance(one, int) else {"stringValue": one}

    def span(place: int, seconds: list[int], attributes: Json) -> Json:
        named = attributes | {"lightning.rollout_id": rollout}
        start, end = (str((1_700_000_000 + second) * 10**9) for second in seconds)
        return {
            "traceId": f"{uuid.uuid5(uuid.NAMESPACE_OID, rollout).hex}", "spanId": f"{first_id + place:016x}",
            "name": "chat", "kind": 3, "startTimeUnixNano": start, "endTimeUnixNano": end,
            "attributes": [{"key": name, "value": value(one)} for name, one in named.items()],
        }  # fmt: skip

    told = [span(i, one.get("seconds", [0, 1]), one["attributes"]) for i, one in enumerate(spans)]
    answer = model.proxy.post("/otlp/v1/traces", {"resourceSpans": [{"scopeSpans": [{"spans": told}]}]})
    assert (answer.status, answer.json) == (200, {})
    return model.proxy.rollout(rollout)


@pytest.mark.feature("otel")
def test_what_was_said_is_read_from_spans_of_others(model: Scripted) -> None:
    for case in cases_with("span"):
        (call,) = post_spans(model, uuid.uuid4().hex, [{"attributes": case["span"]}])["calls"]
        assert [m["content"] for m in call["request"]["messages"] if m["role"] == "user"] == [case["user_text"]]
        assert call["response"]["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.feature("otel")
def test_spans_stand_in_the_order_of_their_own_times(model: Scripted) -> None:
    for case in cases_with("posts"):
        name = uuid.uuid4().hex
        rollout = [post_spans(model, name, spans, 100 * i) for i, spans in enumerate(case["posts"], 1)][-1]
        assert [call["model"] for call in rollout["calls"]] == case["models"]
        assert results_of(rollout) == case["results"]
        assert all(call["latency_ms"] >= 0 for call in rollout["calls"])


def test_what_an_odd_record_holds_is_shown_as_json(model: Scripted, rollout: str) -> None:
    for case in cases_with("command"):
        model.results(rollout, case["turns"])
        done = model.proxy.run(*(rollout if part == "%ROLLOUT%" else part for part in case["command"]))
        assert done.returncode == 0 and done.json, done.stderr
