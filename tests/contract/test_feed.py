"""CONTRACT.md, section 3: `GET /feed` tells of what happens as it happens, and goes on where a reader stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from contract.system import Proxy, in_this_process, served, wait_until

pytestmark = pytest.mark.feature("page")


class Event(NamedTuple):
    """One event. `kind` None: only an id, from which a reader would go on."""

    n: int
    kind: str | None
    data: Any


@contextmanager
def reading(proxy: Proxy, query: str = "", key: str | None = None, **headers: str) -> Iterator[Iterator[Event]]:
    """The events of a feed, one after the other. No event for a minute is an error."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        names["Authorization"] = f"Bearer {key}"
    with proxy.client.stream("GET", f"{proxy.url}/feed{query}", headers=names) as answer:
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        yield _events(answer.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            if "id" in fields:
                yield Event(int(fields["id"]), fields.get("event"), json.loads(fields.get("data", "null")))
            fields = {}


def until(events: Iterator[Event], kind: str, **data: Any) -> Event:
    return next(one for one in events if one.kind == kind and one.data.items() >= data.items())


def test_a_feed_tells_of_calls_rewards_and_rollouts_as_they_happen(proxy: Proxy, name: str) -> None:
    with reading(proxy) as feed:
        assert next(feed).kind is None, "where it begins"
        proxy.chat(f"{name}/tasks/t1/agents/writer")
        opened = until(feed, "rollout", rollout_id=name)
        assert opened.data == {
            "rollout_id": name, "task_id": "t1", "mode": "train", "status": "running", "reward": None,
        }  # fmt: skip
        call = until(feed, "call", rollout_id=name, task_id="t1", seq=0, agent="writer", status="ok").data
        assert call["policy_version"] == 0 and call["finish_reason"] == "stop" and call["latency_ms"] > 0
        posted = proxy.post("/reward", {"rollout_id": name, "reward": 0.5, "source": "env"}).json
        until(feed, "reward", reward_id=posted["reward_id"], reward=0.5, source="env", call_id=None)
        until(feed, "rollout", rollout_id=name, status="completed", reward=0.5)


def test_a_feed_goes_on_where_its_reader_stopped(proxy: Proxy, name: str) -> None:
    with reading(proxy) as feed:
        proxy.chat(f"{name}-1")
        seen = until(feed, "call", rollout_id=f"{name}-1")
    proxy.chat(f"{name}-2")
    again = []
    for query, headers in ((f"?cursor={seen.n}", {}), ("", {"Last_Event_ID": str(seen.n)})):
        with reading(proxy, query, **headers) as feed:
            assert next(feed)[:2] == (seen.n, None)
            again.append([next(feed), next(feed)])
    assert again[0] == again[1]
    told = [(one.kind, one.data["rollout_id"]) for one in again[0]]
    assert told == [("rollout", f"{name}-2"), ("call", f"{name}-2")]


def test_a_reader_learns_that_it_missed_something(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        for _ in range(11):
            assert proxy.post("/rollouts", {"n": 1000}).status == 200
        for cursor in (0, 10**9):  # forgotten: 10,000 events are kept; of another store
            with reading(proxy, f"?cursor={cursor}") as feed:
                assert next(feed).kind == "missed"
                proxy.chat(f"after-{cursor}")
                assert until(feed, "call").data["rollout_id"] == f"after-{cursor}"


def test_a_key_hears_of_what_it_may_see_for_as_long_as_it_is_one(tmp_path: Path) -> None:
    with in_this_process(tmp_path, proxy={"api_keys": ["all"]}) as proxy:
        own, other = (proxy.new_key(one, "--scope", "own") for one in ("ann", "bob"))
        assert proxy.call("GET", "/feed").status == 401
        (opened,) = proxy.post("/rollouts", {}, "all").json
        assert proxy.call("GET", "/feed", key=opened["api_key"]).status == 403
        with proxy.client.stream("GET", f"{proxy.url}/feed", headers={"Authorization": f"Bearer {own}"}) as answer:
            lines = answer.iter_lines()
            events = _events(lines)
            next(events)
            proxy.chat("bobs", key=other)
            proxy.chat("anns", key=own)
            assert until(events, "call").data["rollout_id"] == "anns"
            assert proxy.run("keys", "revoke", "ann").returncode == 0
            wait_until(lambda: proxy.call("GET", "/rollouts", key=own).status == 401, 30, "the key is gone")
            proxy.chat("after", key="all")
            rest = "\n".join(lines)
        assert "after" not in rest and "a valid API key is needed" in rest


def test_reading_takes_no_place_of_a_keys_requests_at_once(tmp_path: Path) -> None:
    access = {"api_keys": ["key"], "limits": {"concurrent": 1}}
    with in_this_process(tmp_path, proxy=access) as proxy, ExitStack() as stack:
        for _ in range(2):
            feed = stack.enter_context(reading(proxy, key="key"))
            assert next(feed).kind is None
            assert proxy.chat("r1", key="key").status == 200


def test_a_feed_does_not_hold_up_the_end_of_the_proxy(tmp_path: Path) -> None:
    with served(tmp_path, proxy={"stop_timeout_s": 300}) as proxy, reading(proxy) as feed:
        next(feed)
        assert proxy.server.end(seconds=60) == 0
        assert list(feed) == []
