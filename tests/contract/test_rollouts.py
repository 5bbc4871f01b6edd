"""CONTRACT.md, section 3: rollouts are opened, listed, read, ended and deleted; events of agents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import Scripted, said
from contract.system import Json, Proxy, in_this_process

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
DOCS = Path(__file__).parents[2] / "docs"


def test_siblings_are_opened_with_base_urls_and_keys_of_their_own(proxy: Proxy) -> None:
    body = {"task_id": "siblings", "mode": "eval", "metadata": {"who": ["me", None]}, "n": 2}
    first, second = proxy.post("/rollouts", body).json
    for one in (first, second):
        assert one.keys() == {"rollout_id", "base_url", "api_key"}
        assert one["base_url"] == f"{proxy.url}/rollouts/{one['rollout_id']}/v1"
        found = proxy.rollout(one["rollout_id"])
        assert {field: found[field] for field in ("task_id", "mode", "metadata", "status", "reward")} == {
            "task_id": "siblings", "mode": "eval", "metadata": body["metadata"], "status": "running", "reward": None,
        }  # fmt: skip
    assert len({one[field] for one in (first, second) for field in ("rollout_id", "api_key")}) == 4
    key, name = first["api_key"], first["rollout_id"]
    assert proxy.client.post(f"{first['base_url']}/chat/completions", json=CHAT).status_code == 200
    assert proxy.post("/v1/chat/completions", CHAT, key).status == 200
    assert len(proxy.rollout(name)["calls"]) == 2
    assert proxy.chat(second["rollout_id"], key=key).status == 403, "a key is for its own rollout"
    assert proxy.post("/reward", {"rollout_id": second["rollout_id"], "reward": 1}, key).status == 403
    assert proxy.post("/reward", {"rollout_id": name, "reward": 1}, key).status == 200


def test_a_rollout_is_opened_for_training_and_of_no_task_unless_it_says_more(proxy: Proxy) -> None:
    (opened,) = proxy.post("/rollouts", {}).json
    found = proxy.rollout(opened["rollout_id"])
    assert [found[field] for field in ("task_id", "mode", "metadata")] == [None, "train", {}]
    assert len(proxy.post("/rollouts", {"n": 3.0}).json) == 3, "JSON has one kind of numbers"


def test_a_rollout_joins_the_group_of_the_sibling_that_it_replaces(proxy: Proxy) -> None:
    first, second = (one["rollout_id"] for one in proxy.post("/rollouts", {"task_id": "joined", "n": 2}).json)
    (third,) = proxy.post("/rollouts", {"sibling_of": second}).json
    assert proxy.rollout(third["rollout_id"])["task_id"] == "joined"
    group = proxy.get(f"/rollouts/{first}/rows")["group"]
    assert [one["rollout_id"] for one in group] == [first, second, third["rollout_id"]]
    assert proxy.post("/rollouts", {"sibling_of": second, "task_id": "other"}).status == 422
    assert proxy.post("/rollouts", {"sibling_of": "nobody"}).status == 404


def test_a_wrong_rollout_is_not_opened(proxy: Proxy) -> None:
    before = proxy.get("/rollouts?limit=1")
    wrong: list[tuple[Json, str]] = [({"n": n}, "n") for n in (-1, 1001, True, "2", 3.5)]
    wrong += [({"mode": "both"}, "mode"), ({"task_id": "a b"}, "task_id"), ({"task_id": "x" * 201}, "task_id")]
    wrong += [({"metadata": 5}, "metadata"), ({"surprise": 1}, "surprise")]
    for body, param in wrong:
        answer = proxy.post("/rollouts", body)
        assert (answer.status, answer.error["param"].split(".")[-1]) == (422, param), body
    assert proxy.get("/rollouts?limit=1") == before


def test_a_small_request_makes_no_large_record(tmp_path: Path) -> None:
    with in_this_process(tmp_path, proxy={"max_body_mb": 1}) as proxy:
        body = {"n": 1000, "metadata": {"notes": "x" * 2000}}
        answer = proxy.post("/rollouts", body)
        assert (answer.status, answer.error["param"]) == (413, "metadata")
        assert proxy.get("/rollouts")["data"] == []
        assert len(proxy.post("/rollouts", body | {"n": 10}).json) == 10


# Lists


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """Rollouts a to e1, each with something of its own."""
    with in_this_process(tmp_path_factory.mktemp("catalogue")) as proxy:
        key, admin = proxy.new_key("ci"), proxy.new_key("boss", "--admin")
        for name, sender, path, said, mode in (
            ("a", key, "/tasks/t1/agents/writer", "one zebra", "train"),
            ("b", admin, "/tasks/t1/agents/critic", "two", "train"),
            ("c", admin, "/tasks/t2", "three", "eval"),
            ("d", admin, "", "four", "train"),
            ("e1", admin, "", "five", "train"),
        ):
            body = {"model": "policy", "messages": [{"role": "user", "content": said}]}
            sent = proxy.post(f"/rollouts/{name}{path}/v1/chat/completions", body, sender, X_Rollout_Mode=mode)
            assert sent.status == 200
        for name, reward in (("a", 1.0), ("b", 0.25)):
            assert proxy.post("/reward", {"rollout_id": name, "reward": reward}, admin).status == 200
        for name, status in (("d", "failed"), ("e1", "discarded")):
            assert proxy.post(f"/rollouts/{name}/end", {"status": status}, admin).status == 200
        proxy.client.headers["Authorization"] = f"Bearer {admin}"
        yield proxy


def listed(proxy: Proxy, query: str) -> str:
    return " ".join(one["rollout_id"] for one in proxy.get(f"/rollouts?{query}")["data"])


FILTERED = {
    "": "e1 d c b a",
    "status=completed": "b a",
    "status=running": "c",
    "status=failed": "d",
    "task_id=t1": "b a",
    "task_id=nothing": "",
    "agent=writer": "a",
    "mode=eval": "c",
    "mode=train&status=completed&task_id=t1&agent=critic": "b",
    "min_reward=0.5": "a",
    "max_reward=0.5": "b",
    "min_reward=0&max_reward=1&limit=1": "b",
    "text=zebra": "a",
    "prefix=e": "e1",
    "version=0": "e1 d c b a",
    "version=1": "",
    "step=1": "",
    "key=ci": "a",
    "key=nobody": "",
    "model=base&agent=critic": "b",
    "model=none": "",
}


def test_a_list_has_what_its_filters_say_newest_first(catalogue: Proxy) -> None:
    assert {query: listed(catalogue, query) for query in FILTERED} == FILTERED
    since = catalogue.rollout("c")["created_at"]
    assert listed(catalogue, f"since={since}") == "e1 d c"


def test_pages_go_on_where_the_last_one_ended(catalogue: Proxy) -> None:
    for query in ("", "&min_reward=-9&max_reward=9", "&version=0"):
        everything, seen, cursor = listed(catalogue, query), [], ""
        while cursor is not None:
            page = catalogue.get(f"/rollouts?limit=2{query}{cursor and '&cursor=' + cursor}")
            assert page.keys() == {"data", "next_cursor"} and len(page["data"]) <= 2
            seen += [one["rollout_id"] for one in page["data"]]
            cursor = page["next_cursor"]
        assert " ".join(seen) == everything


def test_a_wrong_filter_is_refused_by_name(catalogue: Proxy) -> None:
    wrong = {"cursor=x": 400, "cursor=-1": 400} | dict.fromkeys((
        "limit=0", "limit=1001", "status=won", "mode=both", "task_id=a%20b", "min_reward=nan", "since=soon",
        "version=-1", "text=",
    ), 422)  # fmt: skip
    for query, status in wrong.items():
        answer = catalogue.call("GET", f"/rollouts?{query}")
        assert (answer.status, answer.error["param"].split(".")[-1]) == (status, query.partition("=")[0])
    assert catalogue.call("GET", "/rollouts?limit=1000").status == 200


def test_with_words_a_list_says_what_was_asked_and_answered(catalogue: Proxy) -> None:
    one = catalogue.get("/rollouts?words=true&prefix=a")["data"][0]
    assert [one[field] for field in ("question", "model", "key", "last_call")] == ["one zebra", "base", "ci", "ok"]
    assert one["answer"].startswith("by base") and one["latency_ms"] > 0
    assert "question" not in catalogue.get("/rollouts?prefix=a")["data"][0]


# One rollout


def talk(proxy: Proxy, name: str, turns: int) -> None:
    """A conversation; each turn sends all of the earlier ones, and a tool."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages = [{"role": "system", "content": "be brief " * 20}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} " + "again and again " * 20})
        answer = proxy.chat(name, *messages, tools=tools)
        messages.append(answer.json["choices"][0]["message"])


def test_a_call_says_what_its_request_adds_to_an_earlier_ones(proxy: Proxy, name: str) -> None:
    talk(proxy, name, 3)
    short, whole = proxy.get(f"/rollouts/{name}")["calls"], proxy.rollout(name)["calls"]
    ids = [call["call_id"] for call in short]
    assert [call["request_of"] for call in short] == [
        None,
        {"call_id": ids[0], "messages": 2, "tools": 1},
        {"call_id": ids[1], "messages": 4, "tools": 1},
    ]
    assert [len(call["request"]["messages"]) for call in short] == [2, 2, 2]
    assert [len(call["request"]["messages"]) for call in whole] == [2, 4, 6]
    assert whole_requests(short) == {call["call_id"]: call["request"] for call in whole}
    assert [call["seq"] for call in whole] == [0, 1, 2]
    states = proxy.get(f"/rollouts/{name}/transitions")["data"]
    assert [one["state"].get("request_of") for one in states] == [call["request_of"] for call in short]
    assert proxy.call("GET", f"/rollouts/{name}?requests=all").status == 422


def whole_requests(calls: list[Json]) -> Json:
    """What docs/client.md tells a reader to do."""
    (code,) = re.findall(r"```python\n(def whole_requests.*?)```", (DOCS / "client.md").read_text(), re.S)
    names: dict[str, Callable[[list[Json]], Json]] = {}
    exec(code, names)
    return names["whole_requests"](calls)


DIALECTS: dict[str, tuple[Json, Any]] = {  # what stays the same of a conversation's requests, and an answer
    "/v1/chat/completions": ({"tools": [{"type": "function", "function": {"name": "f"}}], "stop": ["\n"]}, said("x")),
    "/v1/completions": ({"logit_bias": {"7": 1}}, "x"),
    "/v1/responses": ({"instructions": "be brief " * 9, "tools": [{"type": "function", "name": "f"}]}, []),
    "/v1/messages": ({"system": [{"type": "text", "text": "be brief " * 9}], "max_tokens": 9}, []),
}


def test_short_requests_of_each_dialect_made_whole_are_the_whole_ones(model: Scripted) -> None:
    """A history that grows, is edited, and forks."""
    for path, (fixed, answer) in DIALECTS.items():
        name = path.replace("/", "-")
        field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
        for texts in (["a"], ["a", "b"], ["a", "c", "d"], ["a", "b", "e"], ["z"]):
            said_so_far = [{"role": "user", "content": text * 999} for text in texts]
            history = "".join(text * 999 for text in texts) if field == "prompt" else said_so_far
            model.ask(f"/rollouts/{name}{path}", fixed | {field: history}, answer)
        short, whole = model.proxy.get(f"/rollouts/{name}")["calls"], model.proxy.rollout(name)["calls"]
        assert whole_requests(short) == {call["call_id"]: call["request"] for call in whole}
        assert sum(call["request_of"] is not None for call in short) >= 3, path
        assert len({json.dumps(call["request"]) for call in whole}) == 5


def test_a_rollout_twice_as_long_is_twice_as_large_unless_it_is_asked_for_whole(proxy: Proxy, name: str) -> None:
    for turns in (12, 24):
        talk(proxy, f"{name}-{turns}", turns)
    for route in ("", "/transitions"):
        for form, linear in (("short", True), ("whole", False)):
            small, large = (
                len(json.dumps(proxy.get(f"/rollouts/{name}-{turns}{route}?requests={form}"))) for turns in (12, 24)
            )
            assert (large < 2.2 * small) is linear, (route, form)


def test_a_rollout_ends_once(proxy: Proxy, name: str) -> None:
    proxy.chat(name)
    failed = {"status": "failed", "reason": "the tool crashed"}
    for _ in range(2):
        answer = proxy.post(f"/rollouts/{name}/end", failed)
        assert (answer.status, answer.json["status"], answer.json["reason"]) == (200, "failed", "the tool crashed")
    assert proxy.post(f"/rollouts/{name}/end", {"status": "completed"}).status == 409
    found = proxy.rollout(name)
    assert (found["status"], found["reason"], found["reward"]) == ("failed", "the tool crashed", None)
    assert proxy.post("/rollouts/nobody/end", failed).status == 404
    for wrong in ({"status": "won"}, {"status": "running"}, {}, {"status": "failed", "reason": 5}):
        assert proxy.post(f"/rollouts/{name}/end", wrong).status == 422


@pytest.mark.sqlite
def test_a_deleted_rollout_is_gone_for_good(proxy: Proxy, name: str) -> None:
    def kept() -> bytes:
        return b"".join(path.read_bytes() for path in proxy.directory.glob("store.db*"))

    said: list[Json] = []
    for turn in range(3):
        said.append({"role": "user", "content": f"{turn} zebra-{name} " * 200})
        said.append(proxy.chat(name, *said).json["choices"][0]["message"])
        proxy.chat(f"{name}-other")
    proxy.post(f"/rollouts/{name}/events", {"kind": "note", "value": f"zebra-{name}"})
    assert proxy.call("DELETE", f"/rollouts/{name}").status == 409, "it runs"
    proxy.post("/reward", {"rollout_id": name, "reward": 1, "comment": f"zebra-{name}"})
    assert f"zebra-{name}".encode() in kept()
    assert proxy.call("DELETE", f"/rollouts/{name}").status == 204
    assert f"zebra-{name}".encode() not in kept()
    for method, path in (("GET", ""), ("GET", "/transitions"), ("GET", "/rows"), ("DELETE", "")):
        assert proxy.call(method, f"/rollouts/{name}{path}").status == 404
    assert listed(proxy, f"prefix={name}&limit=9") == f"{name}-other"


def test_the_command_line_deletes_what_can_be_deleted(proxy: Proxy, name: str) -> None:
    proxy.chat(name)
    proxy.post(f"/rollouts/{name}/end", {"status": "discarded"})
    done = proxy.run("rollouts", "delete", f"{name}-nobody", "a/b", name)
    assert (done.returncode, done.stdout) == (1, "deleted 1 rollout\n")
    assert f"no rollout '{name}-nobody'" in done.stderr and "got 'a/b'" in done.stderr
    assert proxy.call("GET", f"/rollouts/{name}").status == 404


# Events

ACTION = {"kind": "action", "name": "retrieve", "arguments": {"q": 1}, "result": ["x"], "agent": "solver"}
STATE = {"kind": "state", "value": {"page": 2}, "name": "browser"}
NOTE = {"kind": "note", "value": "anything"}


def test_an_agents_steps_stand_between_its_calls(proxy: Proxy, name: str) -> None:
    path = f"/rollouts/{name}/events"
    assert proxy.post(path, [STATE, ACTION], X_Task_Id=f"task-of-{name}", X_Rollout_Mode="eval").status == 200
    found = proxy.rollout(name)
    assert (found["status"], found["task_id"], found["mode"]) == ("running", f"task-of-{name}", "eval"), "it is opened"
    proxy.chat(name)
    assert proxy.post(path, NOTE).status == 200
    state, action, note = proxy.rollout(name)["events"]
    assert [one["seq"] for one in (state, action, note)] == [0, 0, 1], "of the call that came next"
    assert [one["kind"] for one in (state, action, note)] == ["state", "action", "note"]
    assert (state["value"], note["value"]) == ({"page": 2}, "anything")
    assert {k: action[k] for k in ACTION} == ACTION | {"agent": "solver"}
    first, second = proxy.get(f"/rollouts/{name}/transitions")["data"]
    assert (first["kind"], first["agent"], second["kind"]) == ("tool", "solver", "llm")
    assert first["action"]["name"] == "retrieve"


def test_events_are_recorded_all_or_none_and_once(proxy: Proxy, name: str) -> None:
    path = f"/rollouts/{name}/events"
    assert proxy.post(path, []).status == 200 and proxy.rollout(name)["events"] == []
    for wrong in ([NOTE, {"kind": "song"}], [NOTE, NOTE | {"surprise": 1}], {"kind": "action"}, [NOTE] * 1001, 5):
        assert proxy.post(path, wrong).status == 422
    assert proxy.rollout(name)["events"] == []
    first, again = (proxy.post(path, [NOTE, STATE], Idempotency_Key=name) for _ in range(2))
    assert (first.status, first.json) == (200, again.json)
    assert proxy.post(path, NOTE, Idempotency_Key=name).status == 409
    assert len(proxy.rollout(name)["events"]) == 2
