"""What the key of one rollout, which code that the policy runs can read, and a key for its own rollouts may not do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.records import Limits
from lightning_proxy.store.database import ConstraintRefused
from lightning_proxy.store.keys import Keyring, Scope
from lightning_proxy.store.opening import opened
from lightning_proxy.store.rollouts import ROLLOUT_SEEN

Running = Callable[..., AbstractAsyncContextManager[Any]]
AGENT = {"Authorization": "Bearer agent"}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def open_one(system: Any, key: dict[str, str] = AGENT, **body: Any) -> tuple[str, dict[str, str]]:
    """A new rollout and its own key."""
    status, (made,) = await system.call("POST", "/rollouts", body, **key)
    assert status == 200
    return made["rollout_id"], bearer(made["api_key"])


async def becomes(system: Any, status: int, method: str, path: str, body: Any, **headers: str) -> Any:
    """The answer, once it has this status."""
    deadline = time.monotonic() + 10
    while (got := await system.call(method, path, body, **headers))[0] != status:
        assert time.monotonic() < deadline, got
        await asyncio.sleep(0.1)
    return got[1]


async def key_of(system: Any, name: str, scope: Scope = "own", **limits: int) -> dict[str, str]:
    """A stored key that the proxy knows by now."""
    async with opened(system.config.store) as database:
        key, _ = await Keyring(database).create(name, "agent", Limits(**limits), recording=True, scope=scope)
    await becomes(system, 200, "GET", "/rollouts", None, **bearer(key))
    return bearer(key)


async def test_a_rollouts_key_calls_no_more_once_the_rollout_has_ended(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        rollout, own = await open_one(system)
        assert (await system.call("POST", "/v1/chat/completions", CHAT, **own))[0] == 200
        assert (await system.call("POST", "/reward", {"rollout_id": rollout, "reward": 1}, **own))[0] == 200
        refused = await becomes(system, 403, "POST", "/v1/chat/completions", CHAT, **own)
        assert refused["error"]["code"] == "rollout_ended"
        assert (await system.call("POST", "/v1/embeddings", CHAT, **own))[0] == 403
        assert (await system.call("POST", "/reward", {"rollout_id": rollout, "reward": 0.5}, **own))[0] == 200
        assert (await system.chat(rollout, **AGENT))[0] == 200, "other keys are not confined"


async def test_another_worker_knows_that_the_rollout_has_ended(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as one, running(tmp_path, api_keys=["agent"]) as other:
        rollout, own = await open_one(one)
        assert (await other.call("POST", "/v1/chat/completions", CHAT, **own))[0] == 200
        assert (await one.call("POST", f"/rollouts/{rollout}/end", {"status": "failed"}, **AGENT))[0] == 200
        refused = await becomes(other, 403, "POST", "/v1/chat/completions", CHAT, **own)
        assert refused["error"]["code"] == "rollout_ended"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/chat/completions", {"X_Rollout_Mode": "eval"}),
        ("/v1/chat/completions", {"X_Task_Id": "easier"}),
        ("/rollouts/{}/tasks/easier/v1/chat/completions", {}),
        ("/rollouts/{}/events", {"X_Rollout_Mode": "eval"}),
        ("/rollouts/{}/events", {"X_Task_Id": "easier"}),
    ],
)
async def test_a_rollouts_key_changes_neither_its_task_nor_its_mode(
    running: Running, tmp_path: Path, path: str, headers: dict[str, str]
) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        rollout, own = await open_one(system, task_id="t")
        body = CHAT if "chat" in path else {"kind": "note", "value": 1}
        assert (await system.call("POST", path.format(rollout), body, **own, **headers))[0] == 403
        same = {"X_Rollout_Mode": "train", "X_Task_Id": "t"}
        assert (await system.call("POST", "/v1/chat/completions", CHAT, **own, **same))[0] == 200
        _, seen = await system.call("GET", f"/rollouts/{rollout}", **AGENT)
        assert (seen["mode"], seen["task_id"], seen["call_count"]) == ("train", "t", 1)
        assert (await system.call("POST", path.format(rollout), body, **AGENT, **headers))[0] == 200


def spans(span_id: str = "cd" * 8, **attributes: Any) -> bytes:
    """One span of a model's answer that has all that training needs, for OTLP."""
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}

    def value(of: Any) -> dict[str, Any]:
        if isinstance(of, list):
            return {"arrayValue": {"values": [value(one) for one in of]}}
        return {kinds[type(of)]: str(of) if isinstance(of, int) else of}

    said = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "x"}], "finish_reason": "stop"}])
    told = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "policy", "gen_ai.output.messages": said,
        "lightning.prompt_token_ids": [1, 2], "lightning.response_token_ids": [3], "lightning.logprobs": [-0.1],
        "lightning.policy_version": 0, "gen_ai.usage.input_tokens": 2, "gen_ai.usage.output_tokens": 1,
    } | {f"lightning.{name}": of for name, of in attributes.items()}  # fmt: skip
    listed = [{"key": name, "value": value(of)} for name, of in told.items()]
    times = {"startTimeUnixNano": "1700000000000000000", "endTimeUnixNano": "1700000001000000000"}
    span = {"traceId": "ab" * 16, "spanId": span_id, "name": "chat", "attributes": listed} | times
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


async def test_what_a_rollouts_key_tells_over_otlp_is_not_trained_on(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        rollout, own = await open_one(system, task_id="t")
        assert (await system.call("POST", "/otlp/v1/traces", spans(rollout_id=rollout), **own))[0] == 200
        for name, value in (("rollout_mode", "eval"), ("task_id", "easier")):
            told = spans(rollout_id=rollout, **{name: value})
            assert (await system.call("POST", "/otlp/v1/traces", told, **own))[0] == 403
        _, seen = await system.call("GET", f"/rollouts/{rollout}", **AGENT)
        (call,) = seen["calls"]
        assert (call["trainable"], "own key" in call["untrainable_reason"], seen["mode"]) == (False, True, "train")
        assert (await system.call("POST", "/otlp/v1/traces", spans("ef" * 8, rollout_id="told"), **AGENT))[0] == 200
        assert (await system.call("GET", "/rollouts/told", **AGENT))[1]["calls"][0]["trainable"]


async def test_a_key_that_may_not_reward_may_only_call(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        rollout, own = await open_one(system, may_reward=False)
        assert (await system.call("POST", "/v1/chat/completions", CHAT, **own))[0] == 200
        for method, path, body in (
            ("POST", "/reward", {"rollout_id": rollout, "reward": 1}),
            ("POST", f"/rollouts/{rollout}/end", {"status": "completed"}),
            ("POST", f"/rollouts/{rollout}/events", {"kind": "note", "value": 1}),
            ("POST", "/otlp/v1/traces", json.loads(spans(rollout_id=rollout))),
            ("GET", f"/rollouts/{rollout}", None),
        ):
            assert (await system.call(method, path, body, **own))[0] == 403, path
        _, seen = await system.call("GET", f"/rollouts/{rollout}", **AGENT)
        assert (seen["status"], seen["rewards"], seen["events"], seen["call_count"]) == ("running", [], [], 1)
        assert (await system.call("POST", "/rollouts", {"may_reward": "no"}, **AGENT))[0] == 422


async def test_a_key_of_scope_own_sees_and_rewards_what_was_opened_with_it(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        mine, theirs = await key_of(system, "mine"), await key_of(system, "theirs")
        asked_for, own = await open_one(system, mine, task_id="t")
        assert (await system.call("POST", "/v1/chat/completions", CHAT, **own))[0] == 200
        assert (await system.chat("called", X_Agent_Name="a", **mine))[0] == 200
        note = {"kind": "note", "value": 1}
        assert (await system.call("POST", "/rollouts/told-of/events", note, **mine))[0] == 200
        assert (await system.call("POST", "/otlp/v1/traces", spans(rollout_id="traced"), **mine))[0] == 200
        made = [asked_for, "called", "told-of", "traced"]
        for rollout in made:
            reward = {"rollout_id": rollout, "reward": 1}
            for method, path, body in (
                ("GET", f"/rollouts/{rollout}", None),
                ("GET", f"/rollouts/{rollout}/transitions", None),
                ("POST", f"/rollouts/{rollout}/events", note),
                ("POST", "/reward", reward),
                ("POST", "/reward", [reward, reward]),
                ("POST", f"/rollouts/{rollout}/end", {"status": "completed"}),
                ("POST", f"/rollouts/{rollout}/v1/chat/completions", CHAT),
                ("POST", "/otlp/v1/traces", json.loads(spans(rollout_id=rollout))),
            ):
                assert (await system.call(method, path, body, **theirs))[0] == 404, path
                assert (await system.call(method, path, body, **mine))[0] == 200, path
        listed = [one["rollout_id"] for one in (await system.call("GET", "/rollouts", **mine))[1]["data"]]
        assert listed == made[::-1]
        assert len((await system.call("GET", "/rollouts?agent=a", **mine))[1]["data"]) == 1
        for path in ("/rollouts", "/rollouts?task_id=t", "/rollouts?agent=a"):
            assert (await system.call("GET", path, **theirs))[1]["data"] == []
        for query, key, tasks in (("", mine, ["t"]), ("?task_id=t", mine, ["t"]), ("", theirs, []), ("", AGENT, ["t"])):
            answer = (await system.call("GET", f"/tasks{query}", **key))[1]
            assert [task["task_id"] for task in answer["data"]] == tasks
            answer = (await system.call("GET", "/policy/compare?a=0&b=0", **key))[1]
            counted = [] if key is AGENT else tasks  # an own key's rewards judge no version for others
            assert [task["task_id"] for task in answer["data"]] == counted
        assert len((await system.call("GET", "/rollouts", **AGENT))[1]["data"]) == 4
        for method, path in (("POST", "/policy/rollback"), ("DELETE", "/rollouts/called")):
            assert (await system.call(method, path, **mine))[0] == 401


async def test_a_call_whose_body_comes_late_does_not_enter_what_another_key_opened_meanwhile(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        mine, theirs = await key_of(system, "mine"), await key_of(system, "theirs")
        body = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: {theirs['Authorization']}\r\n"
        head += f"X-Rollout-Id: named\r\nX-Rollout-Mode: eval\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(system.url.rsplit(":", 1)[1]))
        writer.write(head.encode() + body[:5])
        await asyncio.sleep(0.5)
        assert (await system.chat("named", **mine))[0] == 200
        writer.write(body[5:])
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 20)
        writer.close()
        seen = (await system.call("GET", "/rollouts/named", **mine))[1]
    assert b" 404 " in answer.splitlines()[0] and (seen["mode"], len(seen["calls"])) == ("train", 1)


async def test_a_record_of_another_keys_rollout_is_refused_by_the_store_itself(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        mine = await key_of(system, "mine")
        assert (await system.chat("named", **mine))[0] == 200
        async with opened(system.config.store) as database:
            _, key = await Keyring(database).create("theirs", "agent", Limits(), recording=True, scope="own")
            row = {"rollout_id": "named", "task_id": None, "agent": None, "mode": "eval", "pin": None, "at": 1.0}
            with pytest.raises(ConstraintRefused):
                await database.commit([(ROLLOUT_SEEN, [row | {"key_id": key.key_id, "evidence": False}])])
        assert (await system.call("GET", "/rollouts/named", **mine))[1]["mode"] == "train"


async def test_siblings_of_another_key_are_not_shown_and_a_rollouts_own_key_sees_none(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        mine, theirs = await key_of(system, "mine"), await key_of(system, "theirs")
        first, own = await open_one(system, mine, task_id="t")
        second, _ = await open_one(system, mine, task_id="t")
        third, _ = await open_one(system, theirs, task_id="t")
        async with system.store() as store:
            both = [first, second, third]
            await store.steps.claim(both, 0, groups=[both])
        for key, seen in ((AGENT, both), (mine, [first, second]), (own, [first])):
            status, answer = await system.call("GET", f"/rollouts/{first}/rows", **key)
            assert (status, [sibling["rollout_id"] for sibling in answer["group"]]) == (200, seen)
        assert (await system.call("GET", f"/rollouts/{first}/rows", **theirs))[0] == 404


async def test_the_command_line_makes_keys_for_their_own_rollouts(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        assert (await system.lightning("keys", "create", "team", "--scope", "own"))[0] == 0
        (listed,) = json.loads((await system.lightning("keys", "list", "--json"))[1])["data"]
        assert (listed["name"], listed["scope"]) == ("team", "own")
        assert "agent, own" in (await system.lightning("keys", "list"))[1]
        for wrong in (["--scope", "some"], ["--scope", "own", "--admin"]):
            code, _, err = await system.lightning("keys", "create", "x", *wrong)
            assert (code, "--scope" in err, err.count("\n")) == (2, True, 1)


async def test_control_routes_count_in_a_keys_limits_as_calls_do(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"], admin_keys=["admin"], limits={"requests_per_minute": 2}) as system:
        assert [(await system.call("GET", "/rollouts", **AGENT))[0] for _ in range(2)] == [200, 200]
        for method, path, body in (
            ("GET", "/status", None),
            ("POST", "/reward", b"{"),
            ("POST", "/otlp/v1/traces", b"{}"),
            ("POST", "/v1/chat/completions", CHAT),
        ):
            assert (await system.call(method, path, body, **AGENT))[0] == 429, path
        async with system.session.get(f"{system.url}/rollouts", headers=AGENT) as answer:
            assert (answer.status, 1 <= int(answer.headers["retry-after"]) <= 30) == (429, True)
        for path in ("/healthz", "/readyz", "/metrics"):
            async with system.session.get(system.url + path, headers=AGENT) as answer:
                assert answer.status == 200
        admin = bearer("admin")
        assert [(await system.call("GET", "/rollouts", **admin))[0] for _ in range(5)] == [200] * 5


async def test_a_key_without_tokens_left_can_still_reward(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, limits={"tokens_per_minute": 3}) as system:
        assert (await system.chat("r1"))[0] == 200  # of 5 tokens
        assert (await system.chat("r1"))[0] == 429
        assert (await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 1}))[0] == 200


@pytest.mark.parametrize("keys", [{"api_keys": ["agent"]}, {}])
async def test_a_rollouts_key_leaves_no_call_out_of_its_record(
    running: Running, tmp_path: Path, keys: dict[str, Any]
) -> None:
    async with running(tmp_path, **keys) as system:
        rollout, own = await open_one(system)
        off = {"X_Recording": "off"}
        for path in ("/v1/chat/completions", f"/rollouts/{rollout}/v1/chat/completions"):
            status, answer = await system.call("POST", path, CHAT, **own, **off)
            assert (status, answer["error"]["param"]) == (403, "X-Recording")
        assert (await system.call("POST", "/v1/chat/completions", CHAT, **own, X_Recording="on"))[0] == 200
        assert (await system.call("POST", "/v1/chat/completions", CHAT, **AGENT, **off))[0] == 200
        _, seen = await system.call("GET", f"/rollouts/{rollout}", **AGENT)
        assert seen["call_count"] == 1
