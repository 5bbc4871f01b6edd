"""Every route of /openapi.json, asked with each kind of key: who is let in, and whose rollouts are shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightning_proxy.proxy.promotion.promotions import Promotions
from lightning_proxy.proxy.store.keys import Keyring
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.training import ComparedGroup
from lightning_proxy.proxy.types import Limits

Running = Callable[..., AbstractAsyncContextManager[Any]]
OPEN = "everybody"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "SECRET"}]}
# What tells of the other tenant: its ids, tasks, texts, rewards, numbers that were made of these; and paths.
OF_THEIRS = ("b-task", "SECRET", "0.1234")


class Asked(NamedTuple):
    """How a route is asked, and its status for a key of its own rollouts, of all, an admin's, and a rollout's own.

    `shows`: keys that see all find the other tenant in the answer. `{}` in the query is its rollout.
    """

    own: int
    all: int
    admin: int
    rollout: int
    shows: bool = False
    body: Any = None
    query: str = ""


REWARD = {"rollout_id": "{}", "reward": 0.1234, "final": False}
NOTE = {"kind": "note", "value": "SECRET"}
EVENT = {"event_type": "note", "data": {"text": "SECRET"}}
VERSION = {"version": 99}
# A rollout's key that may only call the model gets 403 where this says 200 to a rollout's key, and the same elsewhere.
ROUTES: dict[tuple[str, str], Asked | str] = {
    ("get", "/healthz"): OPEN,
    ("get", "/readyz"): OPEN,
    ("get", "/metrics"): OPEN,
    ("post", "/reward"): Asked(404, 200, 200, 403, body=REWARD),
    ("post", "/rollouts"): Asked(200, 200, 200, 403, body={}),
    ("get", "/rollouts"): Asked(200, 200, 200, 403, True),
    ("get", "/rollouts/{rollout_id}"): Asked(404, 200, 200, 403, True),
    ("delete", "/rollouts/{rollout_id}"): Asked(401, 401, 404, 401),  # one that is not there
    ("get", "/rollouts/{rollout_id}/transitions"): Asked(404, 200, 200, 403, True),
    ("get", "/rollouts/{rollout_id}/rows"): Asked(404, 200, 200, 403, True),
    ("get", "/rollouts/{rollout_id}/tokens"): Asked(404, 200, 200, 403),
    ("post", "/rollouts/{rollout_id}/events"): Asked(404, 200, 200, 403, body=NOTE),
    ("post", "/agl/api/rollouts/{rollout_id}/attempt/0/events"): Asked(404, 200, 200, 403, body=EVENT),
    ("delete", "/rollouts/{rollout_id}/rewards/{reward_id}"): Asked(404, 404, 404, 403),
    ("get", "/people/queue"): Asked(200, 200, 200, 403, True, query="?person=anna"),
    ("post", "/rollouts/{rollout_id}/end"): Asked(404, 409, 409, 403, body={"status": "discarded"}),
    ("get", "/costs"): Asked(200, 200, 200, 403, True, query="?by=task"),
    ("get", "/tasks"): Asked(200, 200, 200, 403, True),
    ("get", "/policy"): Asked(200, 200, 200, 403, True),
    ("get", "/policy/versions"): Asked(200, 200, 200, 403, True),
    ("get", "/policy/steps"): Asked(200, 200, 200, 403, True),
    ("get", "/policy/compare"): Asked(200, 200, 200, 403, True, query="?a=0&b=0"),
    ("post", "/policy/promote"): Asked(401, 401, 404, 401, body=VERSION),
    ("post", "/policy/rollback"): Asked(401, 401, 409, 401),
    ("get", "/status"): Asked(200, 200, 200, 403),
    ("get", "/environments"): Asked(200, 200, 200, 403),
    ("get", "/rewarders"): Asked(200, 200, 200, 403),
    ("get", "/prompts"): Asked(200, 200, 200, 403, True),
    ("post", "/prompts"): Asked(401, 401, 200, 401, body={"name": "writer", "text": "Be brief."}),
    ("get", "/prompts/{name}"): Asked(200, 200, 200, 200, True),
    ("get", "/prompts/{name}/rollouts"): Asked(200, 200, 200, 403, query="?run=run"),
    ("get", "/prompts/{name}/versions/{version}/rollouts"): Asked(200, 200, 200, 403, True),
    ("post", "/prompts/{name}/promote"): Asked(401, 401, 404, 401, body=VERSION),
    ("post", "/prompts/{name}/rollback"): Asked(401, 401, 409, 401),
    ("get", "/feed"): Asked(200, 200, 200, 403, True, query="?cursor=0"),
}


class Tenants(NamedTuple):
    """A running proxy with the rollouts of two tenants. `keys`: by kind."""

    system: Any
    mine: str
    theirs: str
    keys: dict[str, dict[str, str]]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def made(system: Any, name: str, role: Any = "agent", **more: Any) -> dict[str, str]:
    async with opened(system.config.store) as database:
        key, _ = await Keyring(database).create(name, role, Limits(), recording=True, **more)
    async with asyncio.timeout(10):
        while (await system.call("GET", "/rollouts", **bearer(key)))[0] != 200:
            await asyncio.sleep(0.05)
    return bearer(key)


async def lived(system: Any, key: dict[str, str], task: str, prompt: int) -> str:
    """A rollout of a tenant that was called, rewarded, trained on and part of an optimisation."""
    body = {"task_id": task, "metadata": {"optimize": "run", "note": task}, "prompts": {"writer": prompt}}
    status, (opened_,) = await system.call("POST", "/rollouts", body, **key)
    name: str = opened_["rollout_id"]
    assert status == 200
    messages = {**CHAT, "messages": [{"role": "user", "content": "SECRET" if task == "b-task" else "mine"}]}
    assert (await system.call("POST", f"/rollouts/{name}/v1/chat/completions", messages, **key))[0] == 200
    reward = {"rollout_id": name, "reward": 0.1234 if task == "b-task" else 0.5, "comment": messages["messages"]}
    assert (await system.call("POST", "/reward", reward | {"comment": "SECRET" if task == "b-task" else ""}, **key))[0]
    return name


async def learned(system: Any, directory: Path, theirs: str) -> None:
    """What the trainer, the gate and an optimisation made of the other tenant's rollouts."""
    numbers = {"reward_mean": 0.1234, "reward_by_task": {"b-task": 0.1234}}
    async with system.store() as store:
        step = await store.steps.claim([theirs], 0, groups=[ComparedGroup("b-task", [theirs])])
        await store.steps.trained(step, "SECRET/checkpoints/1", numbers)
        failed = await store.versions.new("lora", step, {"reward_mean": 0.1234})
        why = [("UPDATE policy_versions SET error = 'SECRET' WHERE version = :n", [{"n": failed}])]
        await store.database.commit(why)
        await system.candidate(store, directory)
        trial = await Promotions(store.database).now()
        await Promotions(store.database).found(trial.promotion, {"metrics": {"reward": {"difference": 0.1234}}})


@asynccontextmanager
async def two_tenants(running: Running, tmp_path: Path) -> AsyncIterator[Tenants]:
    access: dict[str, Any] = {"api_keys": ["agent"], "admin_keys": ["admin"]}
    async with running(tmp_path, publish="lora", **access) as system:
        for text, more in (("Be kind.", {}), ("Be curt.", {"comment": "SECRET", "metrics": {"reward": 0.1234}})):
            body = {"name": "writer", "text": text, "match": {"agent": "writer"}} | more
            assert (await system.call("POST", "/prompts", body, **bearer("admin")))[0] == 200
        own, other = await made(system, "own", scope="own"), await made(system, "other", scope="own")
        mine, theirs = await lived(system, own, "a-task", 1), await lived(system, other, "b-task", 2)
        (tmp_path / "SECRET").mkdir()
        await learned(system, tmp_path / "SECRET", theirs)
        rollouts = {}
        for name, more in (("rollout", {}), ("call only", {"may_reward": False})):
            _, (given,) = await system.call("POST", "/rollouts", more, **own)
            rollouts[name] = bearer(given["api_key"])
        gone = await made(system, "gone")
        async with opened(system.config.store) as database:
            await Keyring(database).revoke("gone")
        async with asyncio.timeout(10):
            while (await system.call("GET", "/rollouts", **gone))[0] != 401:
                await asyncio.sleep(0.05)
        keys = {"none": {}, "wrong": bearer("lpk-agent-x"), "wrong rollout's": bearer("lpk-rollout-x"), "revoked": gone}
        keys |= {"own": own, "own evaluator": await made(system, "own-judge", scope="own", evaluator=True)}
        keys |= {"all": bearer("agent"), "stored": await made(system, "all"), "admin": bearer("admin")}
        keys |= {
            "evaluator": await made(system, "judge", evaluator=True),
            "stored admin": await made(system, "o", "admin"),
        }
        yield Tenants(system, mine, theirs, keys | rollouts)


def expected(asked: Asked | str, kind: str) -> int:
    if isinstance(asked, str):
        return 200
    if kind in ("none", "wrong", "wrong rollout's", "revoked"):
        return 401
    if kind.endswith("admin"):
        return asked.admin
    if kind in ("own", "own evaluator", "rollout"):
        status: int = getattr(asked, kind.partition(" ")[0])
        return status
    if kind == "call only":
        return 403 if asked.rollout == 200 else asked.rollout
    return asked.all


async def answered(tenants: Tenants, method: str, path: str, asked: Asked | str, kind: str) -> tuple[int, str]:
    """The status, and what is said; of the feed, what is there now."""
    query, body = ("", None) if isinstance(asked, str) else (asked.query, asked.body)
    url = (
        tenants.system.url
        + path.format(
            rollout_id="gone" if method == "delete" else tenants.theirs,
            name="writer",
            version=2,
            call_id="c",
            reward_id=1,
        )
        + query
    )
    data = None if body is None else json.dumps(body).replace("{}", tenants.theirs) if body else "{}"
    headers = {"Content-Type": "application/json"} | tenants.keys[kind]
    async with tenants.system.session.request(method, url, data=data, headers=headers) as answer:
        said = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.7 if path == "/feed" and answer.status == 200 else 30):
                async for chunk in answer.content.iter_any():
                    said += chunk
        return answer.status, said.decode()


async def test_each_route_says_to_each_key_what_the_table_says(running: Running, tmp_path: Path) -> None:
    async with two_tenants(running, tmp_path) as tenants:
        _, document = await tenants.system.call("GET", "/openapi.json", **tenants.keys["admin"])
        there = {(method, path) for path, methods in document["paths"].items() for method in methods}
        assert there == ROUTES.keys()
        found = list[str]()
        for (method, path), asked in ROUTES.items():
            for kind in tenants.keys:
                status, said = await answered(tenants, method, path, asked, kind)
                if status != expected(asked, kind):
                    found.append(f"{method} {path} with {kind}: {status}, not {expected(asked, kind)}: {said[:200]}")
                told = [text for text in (*OF_THEIRS, tenants.theirs) if text in said.replace(f"{path}", "")]
                sees_all = kind in ("all", "stored", "evaluator", "admin", "stored admin")
                if isinstance(asked, Asked) and status < 400 and sees_all and asked.shows and not told:
                    found.append(f"{method} {path} with {kind}: nothing of the other tenant")
                if (
                    isinstance(asked, Asked)
                    and not sees_all
                    and [t for t in told if status < 400 or t != tenants.theirs]
                ):
                    found.append(f"{method} {path} with {kind} tells of the other tenant: {told}")
        assert not found, "\n".join(found)


async def test_a_tenant_is_told_of_its_own_rollouts(running: Running, tmp_path: Path) -> None:
    async with two_tenants(running, tmp_path) as tenants:

        async def asked(path: str) -> Any:
            return (await tenants.system.call("GET", path, **tenants.keys["own"]))[1]

        listed = [one["rollout_id"] for one in (await asked("/rollouts"))["data"]]
        assert listed[-1] == tenants.mine and tenants.theirs not in listed
        assert [task["task_id"] for task in (await asked("/tasks"))["data"]] == ["a-task"]
        status = await asked("/status")
        assert (status["rollouts"], status["waiting"]) == ({"train": {"completed": 1, "running": 2}}, 1)
        base = next(one for one in (await asked("/policy/versions"))["data"] if one["version"] == 0)
        assert base["rewards"] == {"train": {"mean": 0.5, "rollouts": 1}}
        assert [one["step"] for one in (await asked("/policy/steps"))["data"]] == [1]
        _, feed = await answered(tenants, "get", "/feed", ROUTES["get", "/feed"], "own")
        assert tenants.mine in feed and "event: version" in feed


async def test_nobody_adds_rollouts_to_the_optimisation_of_another_key(running: Running, tmp_path: Path) -> None:
    async with two_tenants(running, tmp_path) as tenants:
        body = {"task_id": "t", "metadata": {"optimize": "run"}, "prompts": {"writer": 2}}
        opened_by = dict[str, str]()
        for kind in ("stored", "all", "evaluator", "admin"):
            _, (one,) = await tenants.system.call("POST", "/rollouts", body, **tenants.keys[kind])
            opened_by[one["rollout_id"]] = kind
        opened_by[tenants.mine] = "own"
        expected_ = {"own": {"own"}} | {kind: {kind, "evaluator", "admin"} for kind in opened_by.values()}
        expected_ |= {"own": {"own"}, "stored admin": {"evaluator", "admin"}, "admin": {"evaluator", "admin", "all"}}
        for kind, seen in expected_.items():
            _, tried = await tenants.system.call("GET", "/prompts/writer/rollouts?run=run", **tenants.keys[kind])
            assert {opened_by.get(one["rollout_id"]) for one in tried["data"]} == seen, kind


async def test_retrain_offers_only_what_the_key_may_decide_over(running: Running, tmp_path: Path) -> None:
    async with two_tenants(running, tmp_path) as tenants:
        both = [tenants.mine, tenants.theirs]
        async with tenants.system.store() as store:
            sql = "UPDATE rollouts SET step = 1, group_id = 1 WHERE rollout_id IN (:a, :b)"
            await store.database.commit([(sql, [{"a": both[0], "b": both[1]}])])
            again = {"rollout_id": tenants.mine, "reward": 1, "retrain": True}
            assert (await tenants.system.call("POST", "/reward", again, **tenants.keys["own"]))[0] == 200
            assert [(await store.rollouts.get(name)).step for name in both] == [None, 1]
            assert (await tenants.system.call("POST", "/reward", again, **tenants.keys["all"]))[0] == 200
            assert [(await store.rollouts.get(name)).step for name in both] == [None, None]
