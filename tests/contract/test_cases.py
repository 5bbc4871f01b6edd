"""Inputs that must come out right: `tests/cases/`, whose README explains the keys, and sessions of agent programs.

`sessions/real.jsonl` has what real programs sent to a scripted model, with every word replaced by its digest. The edges
were made by reading the sessions. `sessions/played.txt` has played ones, and says how they are written. A call `sees`
the messages at these places; its `answer` is a message, or an error's status. `with_last`: it is asked at the same time
as the call before; `rejected`: its answer is thrown away; `apart`: calls that nothing in their text ties to the run.
"""

from __future__ import annotations

import json
import random
import re
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract.raw import connect
from contract.scripted import ASKED, CASES, CHAT, MESSAGES, RESPONSES, Json, Scripted, Wire, results_of, together

Case = dict[str, Any]
TOP = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
EXACTLY = "usage finish_reason status trainable response prompt_token_ids response_token_ids logprobs policy_versions"
FIELDS = """
call_id seq agent endpoint status model policy_version request response prompt_token_ids response_token_ids logprobs
finish_reason usage tool_calls reward trainable untrainable_reason superseded_by policy_versions started_at ttft_ms
latency_ms
"""
ALL = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(CASES.glob("*.json"))]
ALL += [{"path": CHAT} | json.loads(line) for line in (CASES / "own.jsonl").read_text(encoding="utf-8").splitlines()]


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


def test_the_agent_gets_an_answers_bytes_and_the_record_what_it_said(
    model: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    for case in cases_with("path", "stream", but="http_version"):
        name = "policy" if case.get("upstream") == "vllm" else "m"
        body = {"model": name, "stream": case.get("asks_stream", True)} | ASKED[case["path"]] | case.get("request", {})
        url, played = f"/rollouts/{uuid.uuid4().hex}", wire(case)
        _, got, is_whole = model.receive("POST", url + case["path"], body, played, case.get("until", "").encode())
        (call,) = model.proxy.get(url)["calls"]
        assert call["request"] == body
        sent = b"".join(played.pieces)
        assert not case.get("clean") or (is_whole and got == sent), got
        assert is_whole is not case.get("broken", False)
        assert not played.was_held
        assert [text for text in case.get("not_in_answer", ()) if text.encode() in got] == []
        assert [text for text in case.get("in_answer", ()) if text.encode() not in got] == []
        assert {key: model.asked.get(key) for key in case.get("sent", ())} == case.get("sent", {})
        first = check_record(case, call)
        if call["status"] == "ok" and "response" not in case:
            (made, *_) = model.proxy.get(url + "/transitions")["data"]
            assert made["action"]["message"] == first.get("message", first.get("text", call["response"]))
    assert "internal error" not in caplog.text


def check_record(case: Case, call: Json) -> Json:
    """Return the first choice of the answer."""
    response, first = call["response"], {}
    if "response" not in case and isinstance(response, dict) and response.get("choices"):
        first = response["choices"][0]
    for key in EXACTLY.split():
        assert call[key] == case.get(key, call[key])
    assert call["trainable"] is (call["untrainable_reason"] is None)
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
    return first


def _object(arguments: str) -> Any:
    """The arguments, if they are an object, or else their text."""
    with suppress(ValueError):
        if isinstance(value := json.loads(arguments), dict):
            return value
    return arguments


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_all_fields_and_a_stream_is_whole(stream: bool, model: Scripted) -> None:
    for case in cases_with("path", "stream", "whole"):
        path, whole, rollout = case["path"], case["whole"], uuid.uuid4().hex
        body = {"model": "m", "stream": stream} | ASKED[path]
        answer = wire(case) if stream else Wire([json.dumps(whole).encode()], "application/json")
        model.ask(f"/rollouts/{rollout}/agents/solver{path}", body, answer)
        (call,) = model.proxy.rollout(rollout)["calls"]
        check_record(case, call)
        assert call.keys() >= {*FIELDS.split()}
        assert call == call | {
            "seq": 0, "agent": "solver", "endpoint": path.removeprefix("/v1/"), "status": "ok", "model": "m",
            "request": body, "response": whole, "usage": whole["usage"], "prompt_token_ids": [],
            "response_token_ids": [], "logprobs": [], "trainable": False, "policy_version": None,
        }  # fmt: skip
        assert all(tool["result"] is tool["is_error"] is None for tool in call["tool_calls"])
        assert 0 <= (call["ttft_ms"] or 0) <= call["latency_ms"] and (call["ttft_ms"] is not None) is stream
        (only,) = model.proxy.get(f"/rollouts/{rollout}/transitions?requests=whole")["data"]
        shown = {name: value for name, value in ASKED[path].items() if name != "max_tokens"}
        assert only["state"] == shown | {"prompt_token_ids": []}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_tool_calls_of_vllms_chat_stream_are_those_of_another_dialects_answer(path: str, model: Scripted) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    for case in cases_with("stream", "tool_calls", but="chat_only"):
        if case["path"] == CHAT:
            answer = model.ask(path, ASKED[path] | {"model": "policy", "stream": True}, wire(case, usage))
            assert model.asked["path"] == CHAT
            (call,) = model.proxy.rollout(answer.headers["x-rollout-id"])["calls"]
            for tool, (call_id, name, given) in zip(call["tool_calls"], case["tool_calls"], strict=True):
                assert (tool["name"], _object(tool["arguments"])) == (name, _object(given))
                assert tool["id"] == (call_id or tool["id"]) and tool["id"].encode() in answer.body


def test_a_client_of_http_1_0_and_a_request_without_a_body(model: Scripted) -> None:
    for case in cases_with("stream", "http_version"):
        body = json.dumps({"model": "m", "stream": True} | ASKED[case["path"]]).encode()
        with model.script(wire(case)) as headers, connect(model.proxy.url) as connection:
            head = f"POST {case['path']} HTTP/{case['http_version']}\r\nX-Script: {headers['X_Script']}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            got = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, sent = got.decode().partition("\r\n\r\n")
        assert sent.encode() == b"".join(wire(case).pieces)
        assert "transfer-encoding" not in head and "connection: close" in head
    for case in cases_with("method", "path"):
        with model.script(Wire([b"{}"], "application/json")) as headers:
            answer = model.proxy.call(case["method"], case["path"], **headers, **case.get("request_headers", {}))
        assert answer.status == case.get("status", 200)
        assert "upstream_path" not in case or model.asked["path"] == case["upstream_path"]


def own(case: Case) -> Any:
    """The case with a text of its own for `%CASE%`."""
    return json.loads(json.dumps(case).replace("%CASE%", uuid.uuid4().hex))


def test_what_comes_later_about_a_call_is_in_its_record(model: Scripted) -> None:
    """`null` at the end of a stream: it breaks there. Each in a rollout that is named, and in one that is not."""

    def ask(method: str, path: str, body: Json | None, said: Json | list[Any]) -> str:
        events = said if isinstance(said, list) else [json.dumps(said)]
        breaks, kind = events[-1] is None, "text/event-stream" if isinstance(said, list) else "application/json"
        pieces = [_piece(event, RESPONSES).encode() for event in events if event]
        wire = Wire(pieces, kind, breaks=breaks)
        headers, got, _ = model.receive(method, prefix + path, body and {"model": "m"} | body, wire)
        assert breaks or got == b"".join(pieces)
        return str(headers.get("x-rollout-id", ""))

    prefix = ""
    for case in [own(case) for case in cases_with("first", "later") for _ in range(2)]:
        prefix = "" if prefix else f"/rollouts/{uuid.uuid4().hex}"
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


def test_results_of_calls_with_one_id_are_matched_within_their_conversation(model: Scripted) -> None:
    for case in map(own, cases_with("asked", "results")):
        rollout = uuid.uuid4().hex
        for path, request, answer in case["asked"]:
            model.ask(path, request, Wire([json.dumps(answer).encode()], "application/json"), X_Rollout_Id=rollout)
        found = model.proxy.rollout(rollout)
        errors = [[tool["is_error"] for tool in call["tool_calls"]] for call in found["calls"] if call["tool_calls"]]
        assert (results_of(found), errors) == (case["results"], case.get("errors", errors))
        check_record(case, found["calls"][0])


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


def test_a_file_of_others_is_imported_and_an_odd_record_is_shown_as_json(model: Scripted, rollout: str) -> None:
    for case in cases_with("command"):
        model.results(rollout, case["turns"])
        done = model.proxy.run(*(rollout if part == "%ROLLOUT%" else part for part in case["command"]))
        assert done.returncode == 0 and done.json, done.stderr
    for case in cases_with("import_file"):
        file = model.proxy.directory / "theirs.jsonl"
        file.write_text(case["import_file"], encoding="utf-8")
        done = model.proxy.run("import", file)
        assert (done.returncode, f"{case['imported']} rollouts" in done.stderr) == (0, True), done.stderr


def post_spans(model: Scripted, rollout: str, spans: list[Json], first_id: int = 1) -> Json:
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
def test_what_was_said_is_read_from_spans_of_others_in_the_order_of_their_times(model: Scripted) -> None:
    for case in cases_with("span"):
        (call,) = post_spans(model, uuid.uuid4().hex, [{"attributes": case["span"]}])["calls"]
        assert [m["content"] for m in call["request"]["messages"] if m["role"] == "user"] == [case["user_text"]]
        assert call["response"]["choices"][0]["message"]["role"] == "assistant"
    for case in cases_with("posts"):
        name = uuid.uuid4().hex
        rollout = [post_spans(model, name, spans, 100 * i) for i, spans in enumerate(case["posts"], 1)][-1]
        assert [call["model"] for call in rollout["calls"]] == case["models"]
        assert results_of(rollout) == case["results"]
        assert all(call["latency_ms"] >= 0 for call in rollout["calls"])


Edge = tuple[str, int]
HERE = Path(__file__).parent / "sessions"
# How much of it is found at least without a name.
RECALL = {"one rollout": 0.9, "continues": 1, "delegates": 0.9, "returns": 0.9, "edits": 0.95, "compacts": 0.8}
WORDS = [
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lemur", "mango",
    "nadir", "ocean", "pearl", "quartz", "river", "summit", "tundra", "umber", "valley", "willow", "yonder", "zephyr",
]  # fmt: skip


def played(text: str) -> list[Json]:
    text = re.sub("^#.*\n", "", text, flags=re.MULTILINE)
    return [_session(*block.splitlines()) for block in text.strip().split("\n\n")]


def _session(label: str, *lines: str) -> Json:
    session: Json = {"label": label, "messages": [], "apart": [], "calls": []}
    for line in lines:
        session["calls"].append(_Line(session, line).call())
    return session


class _Line:
    def __init__(self, session: Json, line: str) -> None:
        self.session, self.calls = session, session["calls"]
        number, rest = line.split(maxsplit=1)
        assert int(number) == len(self.calls), line
        asked, said = rest.split("->")
        self.asked, (self.said, _, edges) = asked.split(), said.replace("^", "").partition("|")
        self.edges = sorted([kind, int(place)] for kind, place in re.findall(r"(\w+) (\d+)", edges))
        self.is_rejected = "^" in said

    def call(self) -> Json:
        call: Json = {
            "sees": [], "answer": None, "edges": self.edges, "run": "a", "headers": {}, "with_last": False,
            "rejected": self.is_rejected,
        }  # fmt: skip
        for word in self.asked:
            match word[0]:
                case "=":
                    call["run"] = word[1:]
                case "%":
                    call["headers"]["Authorization"] = f"Bearer {word[1:]}"
                case "@" | "*":
                    call["headers"]["X-Agent-Name" if word[0] == "@" else "x-openai-subagent"] = word[1:]
                case "~":
                    call["headers"]["x-stainless-retry-count"] = "1"
                case "$":  # as Claude Code names a sub-agent, and who began it
                    names = ("x-claude-code-agent-id", "x-claude-code-parent-agent-id")
                    call["headers"] |= dict(zip(names, word[1:].split("<"), strict=False))
                case "&":
                    call["with_last"] = True
                case _:
                    call["sees"] += map(self.place, self.messages(word))
        call["answer"] = self.answer(self.said.split())
        return call

    def place(self, message: Json) -> int:
        messages = self.session["messages"]
        if message not in messages:
            messages.append(message)
        return int(messages.index(message))

    def messages(self, word: str) -> list[Json]:
        kind, _, text = word.partition(":")
        if kind in ("s", "u"):
            return [{"role": {"s": "system", "u": "user"}[kind], "content": self.text(text)}]
        place, _, position = kind[1:].partition(".")
        of = self.calls[int(place)]
        if kind[0] == "r":
            called = of["answer"]["tool_calls"][int(position or 0)]
            return [{"role": "tool", "tool_call_id": called["id"], "content": self.text(text)}]
        seen = [self.session["messages"][i] for i in of["sees"]]
        asked = seen[1:] if self.asked[0].startswith("s:") and kind[0] == "x" else seen
        return [*(asked if kind[0] in "x+" else []), *([of["answer"]] if kind[0] in "a+" else [])]

    def text(self, words: str) -> str:
        return "\n\n".join(self.piece(*one) for one in re.findall(r"\[(\d+)\]|\(([\d.]+)\)|([\w-]+)", words))

    def piece(self, quoted: str, ordered: str, word: str) -> str:
        if quoted:
            return str(self.calls[int(quoted)]["answer"]["content"])
        if ordered:
            place, _, position = ordered.partition(".")
            called = self.calls[int(place)]["answer"]["tool_calls"][int(position or 0)]
            return str(json.loads(called["function"]["arguments"])["q"])
        return self.sentence(word)

    def sentence(self, word: str) -> str:
        source = random.Random(f"{self.session['label']} {word}")
        return " ".join([word, *source.choices(WORDS, k=8)]) + "."

    def answer(self, words: list[str]) -> Any:
        if words[0].startswith("!"):
            return int(words[0][1:])
        source = len(self.calls)
        said = " ".join(self.sentence(f"answer-{source}-{i}") for i in range(3)) if words[0] == "say" else None
        calls = []
        for position, word in enumerate(words[1:]):
            name, _, order = word.rstrip(")").partition("(")
            made = random.Random(f"{self.session['label']} {source} {position} {word}").randbytes(12).hex()
            function = {"name": name, "arguments": json.dumps({"q": self.text(order)})}
            calls.append({"id": f"call_{made}", "type": "function", "function": function})
        return {"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {})


REAL = [json.loads(line) for line in (HERE / "real.jsonl").read_text(encoding="utf-8").splitlines()]
SESSIONS = [*REAL, *played((HERE / "played.txt").read_text(encoding="utf-8"))]


def replay(model: Scripted, session: Json, prefix: str | None = None) -> tuple[list[str], list[set[Edge]], set[int]]:
    """Send a session's calls, named with `prefix`: each one's rollout, the edges that were found, the rejected ones."""

    def ask(call: Json, answer: Any) -> tuple[str, str]:
        named = {} if prefix is None else {"X-Rollout-Id": f"{prefix}-{call['run']}"}
        messages = [session["messages"][place] for place in call["sees"]]
        got = model.ask(CHAT, {"messages": messages}, answer, **named, **call["headers"])
        return got.headers["x-rollout-id"], got.headers["x-call-id"]

    found, calls = list[tuple[str, str]](), session["calls"]
    starts = [place for place, call in enumerate(calls) if not call["with_last"]]
    with ThreadPoolExecutor(4) as pool:
        for start, end in zip(starts, [*starts[1:], len(calls)], strict=True):
            # They take longer than clocks may differ: the edges go by the calls' times.
            answered = together(end - start, 0.1 if end - start > 1 else 0)
            found += pool.map(lambda call, answered=answered: ask(call, answered(call["answer"])), calls[start:end])
    places = {call_id: place for place, (_, call_id) in enumerate(found)}
    edges, rejected = [set[Edge]() for _ in found], set[int]()
    for rollout in {rollout for rollout, _ in found}:
        for call in model.proxy.get(f"/rollouts/{rollout}")["calls"]:
            place = places[call["call_id"]]
            edges[place] = {(one["edge"], places.get(one["call_id"], -1)) for one in call["contexts"]}
            rejected |= {place} if call["rejected"] else set()
    return [rollout for rollout, _ in found], edges, rejected


def edges_of(call: Json) -> set[Edge]:
    return {(kind, place) for kind, place in call["edges"]}


@pytest.mark.feature("contexts")
def test_the_edges_of_a_session_are_those_that_its_program_made(model: Scripted) -> None:
    for session in SESSIONS:
        _, edges, rejected = replay(model, session, uuid.uuid4().hex)
        assert edges == [edges_of(call) for call in session["calls"]], session["label"]
        assert rejected == {i for i, call in enumerate(session["calls"]) if call["rejected"]}, session["label"]


@pytest.mark.feature("contexts")
def test_unnamed_sessions_at_the_same_time_are_told_apart(model: Scripted) -> None:
    """All at once: played programs with one key, real ones with keys of their own. What is found is right, and most."""
    sessions = [one for one in SESSIONS if "named by" not in one["label"]]  # by headers: in text little ties these
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda session: replay(model, session), sessions))
    runs, seen = dict[str, set[tuple[str, str]]](), Counter[tuple[str, bool, bool]]()
    for session, (rollouts, edges, _) in zip(sessions, found, strict=True):
        for i, call in enumerate(session["calls"]):
            runs.setdefault(rollouts[i], set()).add((session["label"], call["run"]))
            for edge in edges[i] | edges_of(call):
                seen[edge[0], edge in edges[i], edge in edges_of(call)] += 1
            for j in set(range(i)) - {*session["apart"]}:
                seen["one rollout", rollouts[i] == rollouts[j], call["run"] == session["calls"][j]["run"]] += 1
    assert [names for names in runs.values() if len(names) > 1] == []
    assert [name for name, is_found, is_there in seen if is_found and not is_there] == []
    recall = {name: seen[name, True, True] / (seen[name, True, True] + seen[name, False, True]) for name in RECALL}
    assert [name for name, least in RECALL.items() if recall[name] < least] == [], recall
