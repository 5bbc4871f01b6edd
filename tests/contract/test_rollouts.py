"""CONTRACT.md, sections 2 and 3: rewards; rollouts are opened, listed, read, ended and deleted; events of agents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import Scripted, said
from contract.system import Json, Proxy, in_this_process
from support.paths import ROOT

ACTION = {"kind": "action", "name": "retrieve", "arguments": {"q": 1}, "result": ["x"], "agent": "solver"}
STATE = {"kind": "state", "value": {"page": 2}, "name": "browser"}
NOTE = {"kind": "note", "value": "anything"}


def test_siblings_are_opened_with_base_urls_and_keys_of_their_own(proxy: Proxy) -> None:
    body = {"task_id": "siblings", "mode": "eval", "metadata": {"who": ["me", None]}, "n": 2}
    first, second = proxy.post("/rollouts", body).json
    for one in (first, second):
        assert one.keys() == {"rollout_id", "base_url", "api_key"}
        assert one["base_url"] == f"{proxy.url}/rollouts/{one['rollout_id']}/v1"
        found = proxy.rollout(one["rollout_id"])
        assert found | body | {"status": "running", "reward": None} == found | {"n": 2}
    assert len({one[field] for one in (first, second) for field in ("rollout_id", "api_key")}) == 4
    key, name = first["api_key"], first["rollout_id"]
    assert proxy.chat(None, key=key).status == 200
    assert len(proxy.rollout(name)["calls"]) == 1
    assert proxy.chat(second["rollout_id"], key=key).status == 403, "a key is for its own rollout"
    assert proxy.post("/reward", {"rollout_id": second["rollout_id"], "reward": 1}, key).status == 403
    assert proxy.post("/reward", {"rollout_id": name, "reward": 1}, key).status == 200
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
    large = proxy.post("/rollouts", {"n": 1000, "metadata": {"notes": "x" * 100_000}})
    assert (large.status, large.error["param"]) == (413, "metadata"), "a small request makes no large record"
    assert proxy.get("/rollouts?limit=1") == before


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """Rollouts a to e1, each with something of its own."""
    with in_this_process(tmp_path_factory.mktemp("catalogue")) as proxy:
        key, admin = proxy.new_key("ci"), proxy.new_key("boss", "--admin")
        for name, sender, path, said, mode in (
            ("a", key, "/tasks/t1/agents/writer", "one zebra", "train"),
            ("b", admin, "/tasks/t1/agents/critic", "two", "train"), ("c", admin, "/tasks/t2", "three", "eval"),
            ("d", admin, "", "four", "train"), ("e1", admin, "", "five", "train"),
        ):  # fmt: skip
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


def test_a_list_has_what_its_filters_say_newest_first(catalogue: Proxy) -> None:
    filtered = {
        "": "e1 d c b a", "status=completed": "b a", "status=running": "c", "status=failed": "d", "task_id=t1": "b a",
        "task_id=nothing": "", "agent=writer": "a", "mode=eval": "c", "model=base&agent=critic": "b",
        "mode=train&status=completed&task_id=t1&agent=critic": "b", "min_reward=0.5": "a", "max_reward=0.5": "b",
        "min_reward=0&max_reward=1&limit=1": "b", "text=zebra": "a", "prefix=e": "e1", "version=0": "e1 d c b a",
        "version=1": "", "step=1": "", "key=ci": "a", "key=nobody": "", "model=none": "",
    }  # fmt: skip
    assert {query: listed(catalogue, query) for query in filtered} == filtered
    since = catalogue.rollout("c")["created_at"]
    assert listed(catalogue, f"since={since}") == "e1 d c"
    one = catalogue.get("/rollouts?words=true&prefix=a")["data"][0]
    assert [one[field] for field in ("question", "model", "key", "last_call")] == ["one zebra", "base", "ci", "ok"]
    assert one["answer"].startswith("by base") and one["latency_ms"] > 0
    assert "question" not in catalogue.get("/rollouts?prefix=a")["data"][0]


def test_pages_go_on_where_the_last_one_ended_and_wrong_filters_are_named(catalogue: Proxy) -> None:
    for query in ("", "&min_reward=-9&max_reward=9", "&version=0"):
        everything, seen, cursor = listed(catalogue, query), [], ""
        while cursor is not None:
            page = catalogue.get(f"/rollouts?limit=2{query}{cursor and '&cursor=' + cursor}")
            assert page.keys() == {"data", "next_cursor"} and len(page["data"]) <= 2
            seen += [one["rollout_id"] for one in page["data"]]
            cursor = page["next_cursor"]
        assert " ".join(seen) == everything
    assert catalogue.call("GET", "/rollouts?limit=1000").status == 200
    wrong = {"cursor=x": 400, "cursor=-1": 400} | dict.fromkeys(
        ("limit=0", "limit=1001", "task_id=a%20b", "min_reward=nan", "since=soon", "version=-1", "text="), 422
    )
    for query, status in wrong.items():
        answer = catalogue.call("GET", f"/rollouts?{query}")
        assert (answer.status, answer.error["param"].split(".")[-1]) == (status, query.partition("=")[0])


def test_a_call_says_what_its_request_adds_to_an_earlier_ones(proxy: Proxy, name: str) -> None:
    """A rollout twice as long is twice as large, unless it is asked for whole."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for turns in (12, 24):
        messages = [{"role": "system", "content": "be brief " * 20}]
        for turn in range(turns):  # each sends all of the earlier ones, and a tool
            messages.append({"role": "user", "content": f"{turn} " + "again and again " * 20})
            answer = proxy.chat(f"{name}-{turns}", *messages, tools=tools)
            messages.append(answer.json["choices"][0]["message"])
    for route, linear in (("", True), ("?requests=whole", False), ("/transitions", True)):
        small, large = (len(json.dumps(proxy.get(f"/rollouts/{name}-{turns}{route}"))) for turns in (12, 24))
        assert (large < 2.2 * small) is linear, route
    short, whole = proxy.get(f"/rollouts/{name}-12")["calls"], proxy.rollout(f"{name}-12")["calls"]
    ids = [call["call_id"] for call in short]
    of = [{"call_id": ids[i], "messages": 2 * (i + 1), "tools": 1} for i in range(11)]
    assert [call["request_of"] for call in short] == [None, *of]
    assert [len(call["request"]["messages"]) for call in short] == [2] * 12
    assert [(call["seq"], len(call["request"]["messages"])) for call in whole] == [(i, 2 * i + 2) for i in range(12)]
    assert whole_requests(short) == {call["call_id"]: call["request"] for call in whole}
    states = proxy.get(f"/rollouts/{name}-12/transitions")["data"]
    assert [one["state"].get("request_of") for one in states] == [call["request_of"] for call in short]
    assert proxy.call("GET", f"/rollouts/{name}-12?requests=all").status == 422


def whole_requests(calls: list[Json]) -> Any:
    """What docs/client.md tells a reader to do."""
    (code,) = re.findall(r"```python\n(def whole_requests.*?)```", (ROOT / "docs" / "client.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["whole_requests"](calls)


def test_short_requests_of_each_dialect_made_whole_are_the_whole_ones(model: Scripted) -> None:
    """A history that grows, is edited, and forks."""
    dialects: dict[str, tuple[Json, Any]] = {  # what stays the same of a conversation's requests, and an answer
        "/v1/chat/completions": ({"tools": [{"type": "function", "function": {"name": "f"}}], "seed": 1}, said("x")),
        "/v1/completions": ({"logit_bias": {"7": 1}}, "x"),
        "/v1/responses": ({"instructions": "be brief " * 9, "tools": [{"type": "function", "name": "f"}]}, []),
        "/v1/messages": ({"system": [{"type": "text", "text": "be brief " * 9}], "max_tokens": 9}, []),
    }
    for path, (fixed, answer) in dialects.items():
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


def test_an_agents_steps_stand_between_its_calls_all_or_none_and_once(proxy: Proxy, name: str) -> None:
    path = f"/rollouts/{name}/events"
    assert proxy.post(path, [STATE, ACTION], X_Task_Id=f"task-of-{name}", X_Rollout_Mode="eval").status == 200
    found = proxy.rollout(name)
    assert (found["status"], found["task_id"], found["mode"]) == ("running", f"task-of-{name}", "eval"), "it is opened"
    proxy.chat(name)
    assert proxy.post(path, NOTE).status == 200
    events = proxy.rollout(name)["events"]
    expected = [STATE | {"seq": 0}, ACTION | {"seq": 0}, NOTE | {"seq": 1}]
    assert [event | posted for event, posted in zip(events, expected, strict=True)] == events
    path = f"/rollouts/{name}-once/events"
    assert proxy.post(path, []).status == 200 and proxy.rollout(f"{name}-once")["events"] == []
    for wrong in ([NOTE, {"kind": "song"}], [NOTE, NOTE | {"surprise": 1}], {"kind": "action"}, [NOTE] * 1001, 5):
        assert proxy.post(path, wrong).status == 422
    assert proxy.rollout(f"{name}-once")["events"] == []
    first, again = (proxy.post(path, [NOTE, STATE], Idempotency_Key=name) for _ in range(2))
    assert (first.status, first.json) == (200, again.json)
    assert proxy.post(path, NOTE, Idempotency_Key=name).status == 409
    assert len(proxy.rollout(f"{name}-once")["events"]) == 2


@pytest.fixture
def rollout(proxy: Proxy, name: str) -> str:
    assert proxy.chat(name).status == 200
    return name


def test_rollout_and_reward_are_enough_and_a_list_is_recorded_whole_or_not(proxy: Proxy, rollout: str) -> None:
    good, bad = {"rollout_id": rollout, "reward": 1, "final": False}, {"rollout_id": "nobody", "reward": 1}
    assert proxy.post("/reward", [good, bad]).status == 404
    assert proxy.rollout(rollout)["rewards"] == []
    answer = proxy.post("/reward", [good, good | {"name": "style"}])
    assert [one["status"] for one in answer.json] == ["recorded", "recorded"]
    assert proxy.post("/reward", [good] * 10_001).status == 413
    answer = proxy.post("/reward", {"rollout_id": rollout, "reward": 0.5})
    assert answer.status == 200
    assert answer.json == {"reward_id": answer.json["reward_id"], "rollout_id": rollout, "status": "recorded"}
    found = proxy.rollout(rollout)
    assert (found["status"], found["reward"]) == ("completed", 0.5)
    assert [one["name"] for one in found["rewards"]] == ["reward", "style", "reward"]
    last = {"reward": 0.5, "name": "reward", "source": None, "comment": None, "call_id": None}
    assert found["rewards"][2] | last == found["rewards"][2]


def test_a_bad_reward_is_refused_by_name_and_leaves_nothing(proxy: Proxy, rollout: str) -> None:
    refused: list[tuple[Json, int, str]] = [
        *(({"reward": value}, 422, "reward") for value in ("1", True, math.nan, math.inf, 10_001, None)),
        *(({name: value}, 422, name) for name, value in (("final", 1), ("surprise", 1), ("rollout_id", "a b"))),
        *(({name: "nobody"}, 404, name) for name in ("rollout_id", "call_id")),
    ]
    for wrong, status, param in refused:
        answer = proxy.post("/reward", {"rollout_id": rollout, "reward": 1} | wrong)
        assert (answer.status, answer.error["param"].split(".")[-1]) == (status, param)
        assert answer.error["message"]
        found = proxy.rollout(rollout)
        assert (found["rewards"], found["status"]) == ([], "running"), wrong


def test_the_newest_value_counts_and_that_of_a_call_leaves_the_rollout_running(proxy: Proxy, rollout: str) -> None:
    (call,) = proxy.rollout(rollout)["calls"]
    proxy.reward(rollout, 0.3, call_id=call["call_id"])
    found = proxy.rollout(rollout)
    assert (found["status"], found["reward"], found["calls"][0]["reward"]) == ("running", 0.3, 0.3)
    proxy.reward(rollout, 0.4, call_id=call["call_id"], final=True)
    assert proxy.rollout(rollout)["status"] == "completed"
    for value in (0.1, 0.9):
        proxy.reward(rollout, value)
    found = proxy.rollout(rollout)
    assert (found["reward"], [one["reward"] for one in found["rewards"]]) == (0.9, [0.3, 0.4, 0.1, 0.9])


def test_an_idempotency_key_makes_a_repeated_post_harmless_and_is_its_senders_own(proxy: Proxy, rollout: str) -> None:
    body, key = {"rollout_id": rollout, "reward": 1}, rollout.ljust(200, "k")
    first, again = (proxy.post("/reward", body, Idempotency_Key=key) for _ in range(2))
    assert (again.status, again.json) == (200, first.json)
    assert proxy.post("/reward", body | {"reward": 0}, Idempotency_Key=key).status == 409
    assert len(proxy.rollout(rollout)["rewards"]) == 1
    refused = proxy.post("/reward", body, Idempotency_Key=f"{key}k")
    assert refused.status == 422 and "at most 200 characters" in refused.error["message"]
    for opened in proxy.post("/rollouts", {"task_id": "t", "n": 2}).json:
        name, body = opened["rollout_id"], {"rollout_id": opened["rollout_id"], "reward": 1}
        for _ in range(2):  # agents that count their posts all begin with the same key
            assert proxy.post("/reward", body, opened["api_key"], Idempotency_Key="1").status == 200
        assert len(proxy.rollout(name)["rewards"]) == 1
        again = [body | {"name": "late"}, body | {"name": "late", "retrain": True}]
        assert proxy.post("/reward", again, opened["api_key"]).status == 403, "it offers nothing to the trainer again"
        assert len(proxy.rollout(name)["rewards"]) == 1
        assert proxy.post("/reward", again).status == 200


def test_the_range_of_rewards_can_be_set(tmp_path: Path) -> None:
    with in_this_process(tmp_path, rewards={"range": [-1, 2]}) as proxy:
        proxy.chat("r1")
        for wrong, param in (([1e308], "0.reward"), ([-1.5], "0.reward"), ([1.0, 2.01], "1.reward")):
            answer = proxy.post("/reward", [{"rollout_id": "r1", "reward": value} for value in wrong])
            assert (answer.status, answer.error["param"]) == (422, param)
            assert answer.error["message"].endswith("is outside of rewards.range, -1 to 2")
        assert proxy.rollout("r1")["rewards"] == []
        ends = [{"rollout_id": "r1", "reward": reward} for reward in (-1, 2)]
        assert proxy.post("/reward", ends).status == 200
