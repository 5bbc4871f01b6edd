"""CONTRACT.md, section 4: tenants are apart. Every route of /openapi.json is asked with each kind of key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from contract.model import Faulty, ModelVllm
from contract.system import Answer, Json, Proxy, in_this_process, ok, wait_until
from support.paths import has

REWARD = 0.1234
SECRETS = ("b-task", "SECRET", str(REWARD))  # what tells of the other tenant
TRAINER = {"group_size": 2, "tasks_per_step": 1, "learning_rate": 0.05, "report_to": [], "dtype": "float32"}


# The feature that has a route, the status for an own-scoped key, for one of all rollouts, an admin's, and a rollout's
# own key; yes: keys that see all find the other tenant in the answer; then a query or a body, in which `"{}"` is its
# rollout. open: to everybody.
TABLE = """
get /healthz                                                  -       200 200 200 200 open
get /readyz                                                   -       200 200 200 200 open
get /metrics                                                  -       200 200 200 200 open
post /reward                        -       404 200 200 403 no {"rollout_id": "{}", "reward": 0.1234, "final": false}
post /rollouts                                                -       200 200 200 403 no {}
get /rollouts                                                 -       200 200 200 403 yes
get /rollouts/{rollout_id}                                    -       404 200 200 403 yes
delete /rollouts/{rollout_id}                                 -       401 401 404 401 no
get /rollouts/{rollout_id}/transitions                        -       404 200 200 403 yes
get /rollouts/{rollout_id}/rows                               -       404 200 200 403 yes
get /rollouts/{rollout_id}/tokens                             page    404 200 200 403 no
post /rollouts/{rollout_id}/events                  -       404 200 200 403 no {"kind": "note", "value": "SECRET"}
post /agl/api/rollouts/{rollout_id}/attempt/0/events agl 404 200 200 403 no {"event_type":"note","data":{"a":"SECRET"}}
delete /rollouts/{rollout_id}/rewards/{reward_id}             judge   404 404 404 403 no
get /people/queue                                             judge   200 200 200 403 yes ?person=anna
post /rollouts/{rollout_id}/end                               -       404 409 409 403 no {"status": "discarded"}
get /costs                                                    costs   200 200 200 403 yes ?by=task
get /tasks                                                    -       200 200 200 403 yes
get /policy                                                   -       200 200 200 403 yes
get /policy/versions                                          -       200 200 200 403 yes
get /policy/steps                                             -       200 200 200 403 yes
get /policy/compare                                           -       200 200 200 403 yes ?a=0&b=0
post /policy/promote                                          -       401 401 404 401 no {"version": 99}
post /policy/rollback                                         -       401 401 200 401 no
get /status                                                   -       200 200 200 403 no
get /prompts                                                  prompts 200 200 200 403 yes
post /prompts                                       prompts 401 401 200 401 no {"name": "writer", "text": "Be brief."}
get /prompts/{name}                                           prompts 200 200 200 200 yes
get /prompts/{name}/rollouts                                  prompts 200 200 200 403 no ?run=run
post /prompts/{name}/promote                                  prompts 401 401 404 401 no {"version": 99}
post /prompts/{name}/rollback                                 prompts 401 401 409 401 no
get /feed                                                     page    200 200 200 403 yes ?cursor=0
"""


class Route(NamedTuple):
    """A line of the table."""

    method: str
    path: str
    feature: str
    own: str
    all: str
    admin: str
    rollout: str
    shows: str
    more: str = ""


ROUTES = [Route(*line.split(maxsplit=8)) for line in TABLE.strip().splitlines()]
ROUTES = [route for route in ROUTES if route.feature == "-" or has(route.feature)]


@dataclass
class Tenants:
    """A proxy with the rollouts of two tenants, of which the other's were trained on."""

    proxy: Proxy
    mine: str
    theirs: str
    same_task: str  # the other's rollout of the task of `mine`
    keys: dict[str, str | None]  # by kind


def live(proxy: Proxy, key: str, task: str, sibling: int) -> str:
    """A rollout of a tenant that was called and rewarded, and has a prompt's version."""
    theirs = task == "b-task"
    body: Json = {"task_id": task, "metadata": {"optimize": "run", "note": task}}
    body |= {"prompts": {"writer": 1 + theirs}} if has("prompts") else {}
    (opened,) = proxy.post("/rollouts", body, key).json
    name: str = opened["rollout_id"]
    text = "SECRET" if theirs else "mine"
    assert proxy.chat(name, {"role": "user", "content": text}, key=key, max_tokens=4).status == 200
    proxy.reward(name, REWARD if theirs else 0.5 + sibling, key, comment=text)
    return name


def go_wrong(proxy: Proxy) -> None:
    """A version fails, several groups earn the same, which is a standstill, and a call cannot be trained on."""
    for task, rewards in {"c": [0.0, 1.0], "d": [0.5] * 6}.items():
        for i, reward in enumerate(rewards):
            name = f"{task}-{i}"
            assert proxy.chat(f"{name}/tasks/{task}", key="admin", max_tokens=4).status == 200
            proxy.reward(name, reward, "admin")
        proxy.vllm.fault = Faulty.STALE if task == "c" else None
        proxy.run("train", "--once")
    proxy.chat("e", key="admin", max_tokens=4, top_k=1)


@pytest.fixture(scope="module")
def tenants(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    access = {"api_keys": ["agent"], "admin_keys": ["admin"]}
    sections = {"proxy": access, "policy": {"model": str(base), "publish": "lora"}, "trainer": TRAINER}
    with in_this_process(tmp_path_factory.mktemp("SECRET"), ModelVllm(base), **sections) as proxy:
        for text, more in (("Be kind.", {}), ("Be curt.", {"comment": "SECRET", "metrics": {"reward": REWARD}})):
            written = {"name": "writer", "text": text, "match": {"agent": "writer"}} | more
            assert proxy.post("/prompts", written, "admin").status == (200 if has("prompts") else 404)
        own, other = proxy.new_key("own", "--scope", "own"), proxy.new_key("other", "--scope", "own")
        mine, same_task = live(proxy, own, "a-task", 0), live(proxy, other, "a-task", 1)
        theirs = live(proxy, other, "b-task", 0)
        proxy.reward(live(proxy, other, "b-task", 1), 1, other)
        proxy.reward(theirs, REWARD, "admin", final=False)  # acts on all: /policy/compare shows it
        ok(proxy.run("train", "--once"))
        go_wrong(proxy)
        (opened,), (calls,) = (proxy.post("/rollouts", {"may_reward": may}, own).json for may in (True, False))
        revoked = proxy.new_key("gone")
        ok(proxy.run("keys", "revoke", "gone"))
        wait_until(lambda: proxy.call("GET", "/rollouts", key=revoked).status == 401, 30, "the key is gone")
        yield Tenants(proxy, mine, theirs, same_task, {
            "none": None, "wrong": "lpk-x", "revoked": revoked, "own": own, "all": "agent", "admin": "admin",
            "rollout": opened["api_key"], "rollout, calls only": calls["api_key"],
            "own evaluator": proxy.new_key("own-judge", "--scope", "own", "--evaluator"),
            "evaluator": proxy.new_key("judge", "--evaluator"),
        })  # fmt: skip


def expected(route: Route, kind: str) -> int:
    if route.shows == "open":
        return 200
    if kind in ("none", "wrong", "revoked"):
        return 401
    if kind == "rollout, calls only" and route.rollout == "200":
        return 403
    status = {"admin": route.admin, "own": route.own, "own evaluator": route.own}
    return int(status.get(kind, route.rollout if kind.startswith("rollout") else route.all))


def ask(tenants: Tenants, route: Route, key: str | None) -> Answer:
    deleted = "gone" if route.method == "delete" and route.path.endswith("rollout_id}") else tenants.theirs
    path = route.path.format(rollout_id=deleted, name="writer", reward_id=1)
    body = route.more.replace('"{}"', f'"{tenants.theirs}"').encode() or None
    if route.more.startswith("?"):
        path, body = path + route.more, None
    if path.startswith("/feed"):
        return read_feed(tenants.proxy, path, key)
    return tenants.proxy.call(route.method.upper(), path, body, key)


def read_feed(proxy: Proxy, path: str, key: str | None) -> Answer:
    """Return what it says until it tells of a rollout that this key opens now."""
    opened = proxy.post("/rollouts", {}, key)
    last = opened.json[0]["rollout_id"] if opened.status == 200 else None
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with proxy.client.stream("GET", proxy.url + path, headers=headers) as got:
        said = ""
        for line in got.iter_lines():
            said += f"{line}\n"
            if last is not None and last in line:
                break
        return Answer(got.status_code, got.headers, said.encode())


def test_a_route_says_to_each_key_what_the_table_says(tenants: Tenants) -> None:
    paths = tenants.proxy.get("/openapi.json", "admin")["paths"]
    there = {(method, path) for path, methods in paths.items() for method in methods}
    assert there == {(route.method, route.path) for route in ROUTES}, "it has all"
    for route, (kind, key) in itertools.product(ROUTES, tenants.keys.items()):
        answer = ask(tenants, route, key)
        said, name = answer.body.decode(), f"{route.method} {route.path} with the key {kind}"
        assert answer.status == expected(route, kind), (name, said[:300])
        told = [text for text in SECRETS if text in said]
        sees_all = kind in ("all", "evaluator", "admin") or route.shows == "open"
        shown = route.shows == "yes" and sees_all and answer.status == 200
        assert told if shown else sees_all or not told, (name, said[:300])
        assert sees_all or answer.status != 200 or tenants.theirs not in said, name


def test_a_tenant_sees_its_own_rollouts_and_numbers_made_of_these_alone(tenants: Tenants) -> None:
    own = tenants.keys["own"]
    listed = [one["rollout_id"] for one in tenants.proxy.get("/rollouts", own)["data"]]
    assert tenants.mine in listed and tenants.theirs not in listed
    assert [task["task_id"] for task in tenants.proxy.get("/tasks", own)["data"]] == ["a-task"]
    base = next(one for one in tenants.proxy.get("/policy/versions", own)["data"] if one["version"] == 0)
    assert base["rewards"] == {"train": {"mean": 0.5, "rollouts": 1}}
    assert tenants.proxy.chat(tenants.theirs, key=own).status == 404, "it continues none of another's"


def test_rollouts_of_two_tenants_are_never_of_one_group(tenants: Tenants) -> None:
    """They are of one task and rewarded differently, and as many as a group has."""
    names = (tenants.theirs, tenants.mine, tenants.same_task)
    assert [tenants.proxy.rollout(name, "admin")["step"] for name in names] == [1, None, None]
    group = tenants.proxy.get(f"/rollouts/{tenants.mine}/rows", tenants.keys["own"])["group"]
    assert [one["rollout_id"] for one in group] == [tenants.mine]


def test_what_is_made_of_everybodys_rollouts_is_not_shown_to_a_tenant(tenants: Tenants) -> None:
    best = {"best"} if has("evaluation") else set()
    hidden = {
        "/policy": {"last_step"} | best,
        "/policy/versions": {"path", "metrics", "error"} | best,
        "/policy/steps": {"checkpoint", "metrics"},
        "/status": {"per_step", "untrainable", "standstill", "verified", "recent"},
    }
    for path, fields in hidden.items():
        for key, seen in (("admin", fields), (tenants.keys["own"], set())):
            answer = tenants.proxy.get(path, key)
            assert {name for view in answer.get("data", [answer]) for name in fields if view[name]} == seen, path
    if has("page"):
        feed = read_feed(tenants.proxy, "/feed?cursor=0", tenants.keys["own"]).body.decode()
        steps = [frame for frame in feed.split("\n\n") if "event: step" in frame]
        assert steps and all('"reward":null' in step for step in steps)
    status = tenants.proxy.get("/status", tenants.keys["own"])
    assert (status["rollouts"]["train"]["completed"], status["waiting"]) == (1, 1)
    assert [one["step"] for one in tenants.proxy.get("/policy/steps", tenants.keys["own"])["data"]] == [2, 1]


@pytest.mark.feature("prompts")
def test_nobody_adds_rollouts_to_the_optimisation_of_another_key(tenants: Tenants) -> None:
    body = {"metadata": {"optimize": "mine"}, "prompts": {"writer": 2}}
    opened_by = {}
    for kind in ("own", "all", "evaluator", "admin"):
        (opened,) = tenants.proxy.post("/rollouts", body, tenants.keys[kind]).json
        opened_by[opened["rollout_id"]] = kind
    theirs = ["all", "evaluator", "admin"]  # oldest first
    for kind, seen in {"own": ["own"], "all": theirs, "evaluator": theirs[1:], "admin": theirs}.items():
        tried = tenants.proxy.get("/prompts/writer/rollouts?run=mine", tenants.keys[kind])["data"]
        assert [opened_by[one["rollout_id"]] for one in tried] == seen, kind
