"""What keys may do: stored ones, a rollout's own, which code that the policy runs can read, and those with limits."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract.raw import connect
from contract.system import Proxy, in_this_process, wait_until
from lightning_proxy.commands.run.runner import LocalRunner
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import RateLimited
from lightning_proxy.core.records import CallEnd, Choice, Limits
from lightning_proxy.proxy.access.limits import Limiter
from lightning_proxy.store.database import ConstraintRefused
from lightning_proxy.store.keys import Keyring
from lightning_proxy.store.opening import opened
from lightning_proxy.store.rollouts import ROLLOUT_SEEN
from support.stores import store_url

CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
NOTE = {"kind": "note", "value": 1}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """It knows the key "agent"."""
    with in_this_process(tmp_path_factory.mktemp("keyed"), proxy={"api_keys": ["agent"]}) as proxy:
        yield proxy


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Proxy]:
    with in_this_process(tmp_path) as proxy:
        yield proxy


def closed(proxy: Proxy, key: str | None = None) -> None:
    wait_until(lambda: proxy.call("GET", "/rollouts", key=key).status == 401, 30, "the key is gone")


def open_one(proxy: Proxy, key: str | None = "agent", **body: Any) -> tuple[str, str]:
    """A new rollout and its own key."""
    (made,) = proxy.post("/rollouts", body, key).json
    return made["rollout_id"], made["api_key"]


# Stored keys


def test_once_there_was_an_admins_key_agents_are_no_admins(fresh: Proxy) -> None:
    def promotes(key: str) -> int:
        return fresh.post("/policy/promote", {"version": 0}, key).status

    agent = fresh.new_key("agent")
    closed(fresh)
    assert promotes(agent) == 200
    admin = fresh.new_key("ops", "--admin")
    wait_until(lambda: promotes(agent) == 401, 30, "there is an admin")
    assert (promotes(admin), fresh.chat("r1", key=admin).status) == (200, 200)
    fresh.run("keys", "revoke", "ops")
    closed(fresh, admin)
    assert promotes(agent) == 401
    assert fresh.new_key("ops") != admin, "the name is free again"


def test_changes_are_logged_with_the_key_that_made_them_and_never_the_key_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_proxy.audit")
    access = {"admin_keys": ["in-the-file"], "api_keys": ["agents"]}
    with in_this_process(tmp_path, proxy=access) as proxy:
        secret = proxy.new_key("ops", "--admin")
        proxy.chat("r1", key="agents")
        for value in (0.0, 1.0):
            proxy.reward("r1", value, secret)
        assert proxy.call("DELETE", "/rollouts/r1", key=secret).status == 204
        assert proxy.post("/policy/promote", {"version": 0}, "in-the-file").status == 200
        for command in (("revoke", "ops"), ("purge",)):
            assert proxy.run("keys", *command).returncode == 0
            wait_until(lambda command=command: f"was {command[0]}d" in caplog.text, 30, "it is logged")
    told = [record.getMessage() for record in caplog.records if record.name == "lightning_proxy.audit"]
    ops = re.findall(r"key ops \(id \w+\)", told[0])[0]
    assert told == [
        f"{ops} was created (admin, scope all)", f"the reward of rollout r1 was changed, by {ops}",
        f"rollout r1 was deleted, by {ops}", "version 0 was promoted, by key proxy.admin_keys[0]",
        f"{ops} was revoked", f"{ops} was purged",
    ]  # fmt: skip
    assert secret not in caplog.text and "in-the-file" not in caplog.text


def test_a_revoked_key_ends_the_rollouts_keys_that_it_asked_for(fresh: Proxy) -> None:
    key, other = fresh.new_key("a"), fresh.new_key("b")
    (mine, own), (theirs, own_of_theirs) = open_one(fresh, key), open_one(fresh, other)
    assert fresh.chat(mine, key=own).status == fresh.chat(theirs, key=own_of_theirs).status == 200
    fresh.run("keys", "revoke", "a")
    closed(fresh, key)
    assert (fresh.chat(mine, key=own).status, fresh.chat(theirs, key=own_of_theirs).status) == (401, 200)


@pytest.mark.sqlite
def test_a_call_with_recording_off_leaves_nothing_behind(fresh: Proxy) -> None:
    def ask(key: str, **headers: str) -> Any:
        return fresh.post(CHAT_PATH, CHAT | {"messages": [{"role": "user", "content": "between us"}]}, key, **headers)

    silent, ci = fresh.new_key("silent", "--no-recording"), fresh.new_key("ci")
    for answer in (ask(silent), ask(ci, X_Recording="off"), ask(silent, X_Recording="on")):
        assert answer.json["choices"][0]["token_ids"] is None, "what the proxy asked for is taken out"
        assert not {"x-call-id", "x-rollout-id"} & answer.headers.keys()
    assert fresh.get("/rollouts", ci)["data"] == []
    assert 'lightning_unrecorded_calls_total{status="ok"} 3.0' in fresh.call("GET", "/metrics").body.decode()
    wrong = ask(ci, X_Recording="maybe")
    assert (wrong.status, wrong.error["param"]) == (400, "X-Recording")
    assert b"between us" not in b"".join(path.read_bytes() for path in fresh.directory.glob("store.db*"))
    assert "x-call-id" in ask(ci).headers


async def test_agent_programs_do_not_inherit_our_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIGHTNING_API_KEY", "LIGHTNING_PROXY__ADMIN_KEYS", "LIGHTNING_UPSTREAMS", "LIGHTNING_STORE__URL"):
        monkeypatch.setenv(name, "our-secret")
    monkeypatch.setenv("LIGHTNING_NOTE", "theirs")
    runner = LocalRunner(["env"])
    assert await runner.run({"OPENAI_API_KEY": "of-the-rollout"}, tmp_path / "log") == 0
    await runner.close()
    env = (tmp_path / "log").read_text()
    assert "our-secret" not in env and "OPENAI_API_KEY=of-the-rollout" in env and "LIGHTNING_NOTE=theirs" in env


# Limits


def test_a_key_over_its_limit_gets_429_in_the_shape_of_openais_api(fresh: Proxy) -> None:
    key, other = fresh.new_key("a", "--requests-per-minute", "4"), fresh.new_key("b")  # one to see that it is known
    rollout, own = open_one(fresh, key)
    assert fresh.chat(rollout, key=own).status == fresh.chat("r1", key=key).status == 200
    assert fresh.chat("r1", key=other).status == 200
    answers = (fresh.chat("r1", key=key) for _ in range(20))  # on a busy machine, a place is free again meanwhile
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.error["code"] == "rate_limit_exceeded" and 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_and_requests_at_once_are_limited_by_default_limits_too(tmp_path: Path) -> None:
    limits = {"tokens_per_minute": 3, "concurrent": 1}
    with in_this_process(tmp_path, proxy={"limits": limits}) as proxy, ThreadPoolExecutor() as agents:
        proxy.vllm.held = threading.Event()
        first = agents.submit(proxy.chat, "r1")
        wait_until(lambda: proxy.vllm.requests, 30, "the first is under way")
        assert proxy.chat("r1").error["code"] == "rate_limit_exceeded"
        proxy.vllm.held.set()
        assert first.result().status == 200
        refused = proxy.chat("r1")  # the first was of 5 tokens
        assert refused.status == 429 and "3 tokens a minute" in refused.error["message"]
        assert proxy.post("/reward", {"rollout_id": "r1", "reward": 1}).status == 200, "a reward has no tokens"


def test_control_routes_count_in_a_keys_limits_as_calls_do(tmp_path: Path) -> None:
    access = {"api_keys": ["agent"], "admin_keys": ["admin"], "limits": {"requests_per_minute": 2}}
    with in_this_process(tmp_path, proxy=access) as proxy:
        assert [proxy.call("GET", "/rollouts", key="agent").status for _ in range(2)] == [200, 200]
        for method, path, body in (
            ("POST", "/reward", b"{"), ("POST", "/otlp/v1/traces", b"{}"), ("POST", CHAT_PATH, CHAT),
            ("GET", "/rollouts", None),
        ):  # fmt: skip
            answer = proxy.call(method, path, body, "agent")
            assert (answer.status, 1 <= int(answer.headers["retry-after"]) <= 30) == (429, True), path
        for path in ("/healthz", "/readyz", "/metrics"):
            assert proxy.call("GET", path, key="agent").status == 200
        assert [proxy.call("GET", "/rollouts", key="admin").status for _ in range(5)] == [200] * 5


class PlayedClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def ended(usage: dict[str, int] | None = None, ids: tuple[int, ...] = ()) -> CallEnd:
    return CallEnd("c", "r", "ok", None, 200, prompt_token_ids=ids, choices=(Choice(0, ids),), usage=usage)


def enters(limiter: Limiter, times: int = 1) -> int:
    """How many requests of that number are let in, one after the other."""
    let_in = 0
    for _ in range(times):
        with suppress(RateLimited), limiter.counted():
            let_in += 1
    return let_in


def test_a_minutes_requests_may_come_at_once_then_one_at_a_time_and_refused_ones_cost_nothing() -> None:
    clock = PlayedClock()
    limiter = Limiter(Limits(requests_per_minute=6), clock)
    assert enters(limiter, 1000) == 6
    with pytest.raises(RateLimited) as refused, limiter.counted():
        pass
    assert dict(refused.value.headers) == {
        b"retry-after": b"10", b"retry-after-ms": b"10000", b"x-ratelimit-limit-requests": b"6",
        b"x-ratelimit-remaining-requests": b"0", b"x-ratelimit-reset-requests": b"10.000s",
    }  # fmt: skip
    for seconds, times, let_in in ((9.9, 1, 0), (0.1, 2, 1), (3600, 10, 6)):
        clock.now += seconds
        assert enters(limiter, times) == let_in
    limiter = Limiter(Limits(concurrent=2), clock)
    with limiter.counted():
        with limiter.counted():
            assert enters(limiter) == 0
        assert enters(limiter, 3) == 3
    assert Limits(requests_per_minute=5) | Limits(9, 10, None) == Limits(5, 10, None), "a key's own limits win"


def test_tokens_are_counted_when_a_call_has_ended_by_usage_ids_or_bytes() -> None:
    clock = PlayedClock()
    for end, size in (
        (ended({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}), 0),
        (ended({"input_tokens": 100, "output_tokens": 20}), 0),
        (ended(None, tuple(range(60))), 0),
        (ended()._replace(response={"content": "x" * 200}, http_status=200), 280),
    ):
        limiter = Limiter(Limits(tokens_per_minute=60), clock)
        with limiter.counted():
            limiter.spend(end, size)  # 120, twice a minute's worth
        assert enters(limiter) == 0
        clock.now += 60.9
        assert size or enters(limiter) == 0
        clock.now += 9.1 if size else 0.1
        assert enters(limiter, 5) == 5, "what a request will cost is not known when it comes"


# A rollout's own key


def test_a_rollouts_key_calls_no_more_once_the_rollout_has_ended(keyed: Proxy, tmp_path: Path) -> None:
    access, store = {"api_keys": ["agent"]}, {"url": store_url(keyed.directory)}
    with in_this_process(tmp_path, proxy=access, store=store) as other:  # as another worker
        rollout, own = open_one(keyed)
        assert keyed.post(CHAT_PATH, CHAT, own).status == other.post(CHAT_PATH, CHAT, own).status == 200
        assert keyed.post("/reward", {"rollout_id": rollout, "reward": 1}, own).status == 200
        for proxy in (keyed, other):
            wait_until(lambda proxy=proxy: proxy.post(CHAT_PATH, CHAT, own).status == 403, 30, "it has ended")
            assert proxy.post(CHAT_PATH, CHAT, own).error["code"] == "rollout_ended"
    assert keyed.post("/v1/embeddings", CHAT, own).status == 403
    assert keyed.post("/reward", {"rollout_id": rollout, "reward": 0.5}, own).status == 200
    assert keyed.chat(rollout, key="agent").status == 200, "other keys are not confined"


def test_a_rollouts_key_changes_neither_its_task_nor_its_mode(keyed: Proxy) -> None:
    for path, headers in (
        (CHAT_PATH, {"X_Rollout_Mode": "eval"}),
        ("/rollouts/{}/tasks/easier/v1/chat/completions", {}),
        ("/rollouts/{}/events", {"X_Task_Id": "easier"}),
    ):
        rollout, own = open_one(keyed, task_id="t")
        body = CHAT if "chat" in path else NOTE
        assert keyed.post(path.format(rollout), body, own, **headers).status == 403
        assert keyed.post(CHAT_PATH, CHAT, own, X_Rollout_Mode="train", X_Task_Id="t").status == 200
        seen = keyed.rollout(rollout, "agent")
        assert (seen["mode"], seen["task_id"], seen["call_count"]) == ("train", "t", 1)
        assert keyed.post(path.format(rollout), body, "agent", **headers).status == 200


def test_a_key_that_may_not_reward_may_only_call(keyed: Proxy) -> None:
    rollout, own = open_one(keyed, may_reward=False)
    assert keyed.post(CHAT_PATH, CHAT, own).status == 200
    for path, body in (
        ("/reward", {"rollout_id": rollout, "reward": 1}),
        (f"/rollouts/{rollout}/end", {"status": "completed"}),
        (f"/rollouts/{rollout}/events", NOTE),
    ):
        assert keyed.post(path, body, own).status == 403, path
    assert keyed.call("GET", f"/rollouts/{rollout}", key=own).status == 403
    seen = keyed.rollout(rollout, "agent")
    assert (seen["status"], seen["rewards"], seen["events"], seen["call_count"]) == ("running", [], [], 1)
    assert keyed.post("/rollouts", {"may_reward": "no"}, "agent").status == 422


# Two keys with rollouts of their own


def test_nobody_enters_what_another_key_opened_meanwhile(keyed: Proxy) -> None:
    """Neither by a body that comes late, nor where the proxy has not seen it: the store itself refuses the record."""
    mine, theirs = (keyed.new_key(name, "--scope", "own") for name in ("mine", "theirs"))
    body = json.dumps(CHAT).encode()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {theirs}\r\nX-Rollout-Id: named\r\n"
    head += f"X-Rollout-Mode: eval\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(keyed.url) as late:
        late.sendall(head.encode() + body[:5])
        threading.Event().wait(0.5)
        assert keyed.chat("named", key=mine).status == 200
        late.sendall(body[5:])
        assert late.recv(2**16).startswith(b"HTTP/1.1 404 ")

    async def record_by_a_third() -> None:
        async with opened(StoreConfig(url=store_url(keyed.directory))) as database:
            _, key = await Keyring(database).create("third", "agent", Limits(), recording=True, scope="own")
            row = {"rollout_id": "named", "task_id": None, "agent": None, "mode": "eval", "pin": None, "at": 1.0}
            with pytest.raises(ConstraintRefused):
                await database.commit([(ROLLOUT_SEEN, [row | {"key_id": key.key_id, "evidence": False}])])

    asyncio.run(record_by_a_third())
    seen = keyed.rollout("named", mine)
    assert (seen["mode"], len(seen["calls"])) == ("train", 1)
