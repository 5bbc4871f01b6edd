"""CONTRACT.md, section 3: what all routes of the control API share; health and metrics; prompts; the page."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from contract.system import Answer, Json, Proxy, in_this_process, ok, played, served, wait_until
from contract.vllm import PlayedVllm
from support.paths import has

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
PATH_PARTS = {"rollout_id": "nobody", "name": "nobody", "call_id": "nobody", "version": "1", "reward_id": "1"}


def routes(proxy: Proxy) -> Iterator[tuple[str, str, Json]]:
    """Method, path and description of every route of the control API, of features too."""
    for path, methods in proxy.get("/openapi.json")["paths"].items():
        for method, described in methods.items():
            yield method.upper(), path.format(**PATH_PARTS), described


def is_openais(answer: Answer) -> bool:
    types = {"message": str, "type": str, "param": str | None, "code": str | None}
    error = answer.json["error"]
    is_typed = error.keys() == types.keys() and all(isinstance(error[field], kind) for field, kind in types.items())
    return is_typed and answer.json.keys() == {"error"} and bool(error["message"])


def test_errors_of_every_route_have_the_shape_of_openais(proxy: Proxy) -> None:
    """A malformed body, one that says it is something else, none; a wrong method; what does not exist."""
    seen = set()
    for method, path, described in routes(proxy):
        tries: list[tuple[int, Answer]] = [(405, proxy.call("PATCH", path))]
        assert method in tries[0][1].headers["allow"]
        if "requestBody" in described:
            form = {"Content_Type": "application/x-www-form-urlencoded"}
            tries += [(400, proxy.post(path, b'{"rollout_id": "r1", ')), (422, proxy.post(path, b"{}", **form))]
            tries += [(422, proxy.post(path)), (422, proxy.post(path, {"surprise": 1})), (422, proxy.post(path, 5))]
        elif "nobody" in path:
            tries += [(404, proxy.call(method, path))]
        for status, answer in tries:
            assert (answer.status, is_openais(answer)) == (status, True), (method, path, answer.body)
            seen.add(status)
    assert seen == {400, 404, 405, 422}
    for path in ("/nowhere", "/rollouts/nobody/nothing", "/rollouts/nobody", "/prompts/nobody"):
        answer = proxy.call("GET", path)
        assert (answer.status, answer.error["type"], is_openais(answer)) == (404, "not_found_error", True)
    named = proxy.post("/rollouts", b'{"n": 1}', Content_Type="text/plain").error["message"]
    assert named == "the body needs the header Content-Type: application/json; got text/plain"


def test_a_wrong_value_in_a_query_is_refused_by_name_on_every_route(proxy: Proxy, name: str) -> None:
    proxy.chat(name)
    asked = 0
    for method, path, described in routes(proxy):
        parameters = [one for one in described.get("parameters", []) if one["in"] == "query"]
        for one in parameters:
            kinds = json.dumps(one["schema"])
            if not re.search(r'"(integer|number|boolean|enum|const)"', kinds):
                continue
            needed = "&".join(f"{p['name']}=0" for p in parameters if p.get("required") and p is not one)
            answer = proxy.call(method, f"{path.replace('nobody', name)}?{one['name']}=much&{needed}")
            param = answer.error["param"].split(".")[-1]
            assert (answer.status, param, is_openais(answer)) == (422, one["name"], True), (path, one["name"])
            asked += 1
    assert asked > 10


def test_head_is_answered_as_get_is_without_a_body(proxy: Proxy, name: str) -> None:
    proxy.chat(name)
    gets = {path for method, path, _ in routes(proxy) if method == "GET"} - {"/feed"}
    for path in (*gets, f"/rollouts/{name}", "/", "/openapi.json", "/v1/models", "/nothing"):
        head, get = proxy.call("HEAD", path), proxy.call("GET", path)
        assert (head.status, head.body, head.headers["content-type"]) == (
            get.status, b"", get.headers["content-type"],
        ), path  # fmt: skip
    if has("page"):
        assert proxy.call("HEAD", "/feed").headers["content-type"] == "text/event-stream; charset=utf-8"
    refused = proxy.call("HEAD", "/reward")
    assert (refused.status, refused.headers["allow"]) == (405, "POST")


def is_ready(proxy: Proxy, status: int, word: str, **reasons: str) -> None:
    """Whether it is ready, or why not, and whether a call is then answered and recorded."""

    def told() -> bool:
        answer = proxy.call("GET", "/readyz")
        is_so = (answer.status, answer.json["status"]) == (status, word)
        return is_so and all(reason in answer.json[what] for what, reason in reasons.items())

    wait_until(told, 30, f"/readyz is {word}; it says {proxy.call('GET', '/readyz').body.decode()}")
    assert proxy.call("GET", "/healthz").json == {"status": "ok"}, "it lives all the same"
    answer = proxy.chat("probe")
    assert (answer.status == 200) is (status == 200), answer.body


def test_without_a_server_for_the_alias_it_is_not_ready_and_degraded_while_a_fallback_answers(tmp_path: Path) -> None:
    dead = {"name": "policy", "kind": "vllm", "base_url": "http://127.0.0.1:1/v1"}
    with in_this_process(tmp_path, upstreams=[dead]) as proxy:
        is_ready(proxy, 503, "not ready", store="ok", upstream="not reachable")
    with played(PlayedVllm(tmp_path)) as url:
        spare = {"name": "spare", "kind": "openai", "base_url": f"{url}/v1", "model_map": {"policy": "base"}}
        with in_this_process(tmp_path, upstreams=[dead | {"fallbacks": ["spare"]}, spare]) as proxy:
            is_ready(proxy, 200, "degraded", store="ok", upstream="not reachable")
            assert "x-policy-version" not in proxy.chat("r1").headers, "what a fallback answers is no policy version"
            (call,) = proxy.rollout("r1")["calls"]
            assert (call["upstream"], call["policy_version"], call["trainable"]) == ("spare", None, False)


@pytest.mark.sqlite
def test_a_store_that_is_larger_than_it_is_to_be_is_degraded(tmp_path: Path) -> None:
    with in_this_process(tmp_path, store={"retention": {"max_gib": 1e-6}}) as proxy:
        proxy.chat("runs")
        is_ready(proxy, 200, "degraded", store="ok", retention="more than store.retention.max_gib")
        shown = proxy.run("status").stdout
        assert "degraded" in shown and "store.retention.max_gib" in shown


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.sqlite
def test_a_store_that_lost_its_name_is_not_ready(tmp_path: Path, how: str) -> None:
    """What is written to it is found by nobody."""
    with in_this_process(tmp_path) as proxy:
        is_ready(proxy, 200, "ready")
        (tmp_path / "store.db").rename(tmp_path / "away.db")
        if how == "replaced":
            (tmp_path / "store.db").write_bytes((tmp_path / "away.db").read_bytes())
        is_ready(proxy, 503, "not ready", store="store.db was removed or replaced")


def metrics(proxy: Proxy) -> dict[str, float]:
    found = proxy.call("GET", "/metrics")
    assert found.status == 200 and found.headers["content-type"].startswith("text/plain")
    return {name: float(value) for name, value in re.findall(r"^(lightning_\S+) (\S+)$", found.body.decode(), re.M)}


@pytest.mark.sqlite
def test_a_store_that_cannot_be_written_is_not_ready_until_it_can(tmp_path: Path) -> None:
    with in_this_process(tmp_path, store={"busy_timeout_s": 0.05}) as proxy:
        proxy.chat("r1")
        assert metrics(proxy)["lightning_store_up"] == 1
        with closing(sqlite3.connect(tmp_path / "store.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            is_ready(proxy, 503, "not ready", store="")
            locked = metrics(proxy)
        is_ready(proxy, 200, "ready", store="ok", upstream="ok")
        assert proxy.get("/readyz") == {"status": "ready", "store": "ok", "upstream": "ok"}
        assert (locked["lightning_store_up"], metrics(proxy)["lightning_store_up"]) == (0, 1)
        running = 'lightning_rollouts{mode="train",status="running"}'
        assert locked[running] == 1, "counts stay as at the last look"


@pytest.mark.sqlite
def test_a_damaged_store_is_a_503_at_every_door(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        for i in range(30):
            proxy.chat(f"r{i}")
        with closing(sqlite3.connect(tmp_path / "store.db")) as store:
            store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with (tmp_path / "store.db").open("r+b") as file:
            for page in range(1, file.seek(0, 2) // 4096):
                file.seek(page * 4096)
                file.write(b"\x99" * 200)
        for method, path, body in (
            ("GET", "/rollouts", None), ("GET", "/rollouts/r1", None), ("GET", "/readyz", None),
            ("POST", "/reward", {"rollout_id": "r1", "reward": 1}), ("POST", "/v1/chat/completions", CHAT),
        ):  # fmt: skip
            answer = proxy.call(method, path, body)
            assert (answer.status, "malformed" in answer.body.decode()) == (503, True), (path, answer.body)


@pytest.mark.sqlite
def test_metrics_count_what_happens(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        before = metrics(proxy)
        proxy.chat("r1/tasks/t")
        proxy.post("/rollouts/r2/v1/chat/completions", CHAT | {"model": "nobody"})
        proxy.vllm.returns_token_ids = False
        proxy.chat("r2")
        proxy.reward("r1", 1)
        after = metrics(proxy)
        changed = {name: after[name] - before.get(name, 0) for name in after if "_created" not in name}
        for name, by in {
            'calls_total{status="ok"}': 2, 'calls_total{status="error"}': 1, "untrainable_calls_total": 1,
            'tokens_total{kind="sampled"}': 2, "rewards_total": 1, 'rollouts{mode="train",status="completed"}': 1,
            'rollouts{mode="train",status="running"}': 1, "rollouts_waiting": 1, "call_seconds_count": 3,
        }.items():  # fmt: skip
            assert changed[f"lightning_{name}"] == by, name
        assert after['lightning_disk_free_bytes{directory="store"}'] > 0


@pytest.mark.feature("prompts")
def test_versions_of_a_prompt_are_tried_promoted_and_rolled_back(tmp_path: Path) -> None:
    own, better = {"name": "writer", "text": "You write."}, "You write with care. Count your words."

    def shown(rollout: str) -> str:
        """The system message that the model is shown for a call of the agent `writer`."""
        messages = [{"role": "system", "content": "Today is Monday."}, {"role": "user", "content": "write"}]
        assert proxy.chat(f"{rollout}/agents/writer", *messages).status == 200
        return str(proxy.vllm.requests[-1]["messages"][0]["content"])

    with in_this_process(tmp_path) as proxy:
        first = proxy.post("/prompts", own | {"match": {"agent": "writer"}})
        second = proxy.post("/prompts", own | {"text": better, "parent": 1, "comment": "counts"})
        assert (first.json["version"], second.json["version"], second.json["live_version"]) == (1, 2, 1)
        for one in proxy.post("/rollouts", {"n": 2, "task_id": "t", "prompts": {"writer": 2}}).json:
            wait_until(lambda name=one["rollout_id"]: shown(name) == better, 30, "its version is put in")
            assert proxy.get("/prompts/writer", one["api_key"])["text"] == better
            proxy.reward(one["rollout_id"], 0.5)
        versions = proxy.get("/prompts/writer")["versions"]
        assert [one["rewards"] for one in versions] == [{}, {"train": {"mean": 0.5, "rollouts": 2}}]
        assert proxy.post("/rollouts", {"prompts": {"writer": 3}}).status == 404
        assert proxy.post("/prompts", own).json["version"] == 1, "it is there already"
        for path, body, status, live in (
            ("/writer/promote", {"version": 2}, 200, 2), ("/writer/rollback", None, 200, 1),
            ("/writer/rollback", None, 409, None), ("/writer/promote", {"version": 9}, 404, None),
            ("", own | {"text": ""}, 422, None), ("", own | {"text": "x", "metrics": {"good": True}}, 422, None),
            ("", own | {"text": "x", "match": {"role": "user"}}, 409, None),
        ):  # fmt: skip
            answer = proxy.post(f"/prompts{path}", body)
            assert (answer.status, answer.json.get("live_version")) == (status, live), path
        assert [(one["name"], one["version"]) for one in proxy.get("/prompts")["data"]] == [("writer", 1)]


@pytest.mark.feature("page")
def test_the_page_is_served_without_a_key_under_a_policy_that_lets_nothing_else_in(tmp_path: Path) -> None:
    with in_this_process(tmp_path, proxy={"api_keys": ["secret"]}) as proxy:
        for path in ("/", *files(proxy)):
            page = proxy.call("GET", path)
            rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
            assert (page.status, page.headers["x-content-type-options"]) == (200, "nosniff"), path
            assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
            assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert proxy.call("GET", "/status").status == 401, "what it shows needs one"


def files(proxy: Proxy) -> dict[str, str]:
    """The page's modules and style sheets by path: what index.html names, and what these import."""
    found: dict[str, str] = {}
    wanted = [f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', proxy.call("GET", "/").body.decode())]
    while wanted:
        path = wanted.pop()
        if path not in found:
            answer = proxy.call("GET", path)
            assert answer.status == 200, path
            found[path] = answer.body.decode(errors="replace")
            folder = path.rpartition("/")[0]
            wanted += [f"{folder}/{name}" for name in re.findall(r'(?:from|import)\s*"\./([^"]+)";', found[path])]
    return found


@pytest.mark.feature("page")
def test_the_page_reads_only_routes_of_the_api(proxy: Proxy) -> None:
    modules = [text for path, text in files(proxy).items() if "/vendor/" not in path and path.endswith("mjs")]
    addresses = {a.partition("?")[0] for text in modules for a in re.findall(r'["`](/[a-z]+[^"`\s<>]*)["`]', text)}
    asked = {re.sub(r"\$\{[^}]*\}", "{}", address) for address in addresses} - {"/messages"}  # the end of an upstream's
    assert len(modules) > 10 and {"/rollouts", "/policy/compare", "/tasks", "/rollouts/{}/rows"} <= asked
    known = [path.split("/") for path in proxy.get("/openapi.json")["paths"]]

    def is_known(parts: list[str]) -> bool:
        alike = [route for route in known if len(route) == len(parts)]
        return any(all(a == b or "{" in a + b for a, b in zip(parts, route, strict=True)) for route in alike)

    assert [address for address in asked if not is_known(address.split("/"))] == []


def test_a_plugin_is_loaded_only_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "overhears-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: overhears\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lightning_proxy.plugins]\noverhears = overhears\n")
    (tmp_path / "overhears.py").write_text("""
from contextlib import asynccontextmanager
from pathlib import Path
from lightning_proxy.proxy.plugins import Hooks, ProxyPlugin

HEARD = Path(__file__).with_name("heard")
HEARD.touch()

class proxy(ProxyPlugin):
    @asynccontextmanager
    async def opened(self, core):
        yield Hooks(on_call=lambda start, end, headers: HEARD.write_text(end.call_id))
""")
    monkeypatch.syspath_prepend(tmp_path)
    heard = tmp_path / "heard"
    with in_this_process(tmp_path) as proxy:
        assert (proxy.get("/status")["plugins"], heard.exists()) == ([], False)
    with in_this_process(tmp_path, plugins=["overhears"]) as proxy:
        assert proxy.get("/status")["plugins"] == ["overhears"]
        call = proxy.chat("r1").headers["x-call-id"]
        wait_until(lambda: heard.read_text() == call, 30, "it hears of the call")


class Event(NamedTuple):
    n: int
    kind: str | None  # None: only an id, from which a reader would go on
    data: Any


@contextmanager
def reading(proxy: Proxy, query: str = "", **headers: str) -> Iterator[Iterator[str]]:
    """The lines of a feed. None for a minute is an error."""
    with proxy.client.stream("GET", f"{proxy.url}/feed{query}", headers=headers) as answer:
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        yield answer.iter_lines()


def event(lines: Iterator[str]) -> Event:
    fields = dict(line.partition(": ")[::2] for line in iter(lambda: next(lines), ""))
    return Event(int(fields["id"]), fields.get("event"), json.loads(fields.get("data", "null")))


def until(lines: Iterator[str], kind: str, **data: Any) -> Event:
    while True:
        found = event(lines)
        if found.kind == kind and found.data.items() >= data.items():
            return found


@pytest.mark.feature("page")
def test_a_feed_tells_of_what_happens_and_goes_on_where_its_reader_stopped(proxy: Proxy, name: str) -> None:
    with reading(proxy) as feed:
        assert event(feed).kind is None, "where it begins"
        proxy.chat(f"{name}/tasks/t1/agents/writer")
        until(feed, "rollout", rollout_id=name, task_id="t1", mode="train", status="running", reward=None)
        seen = until(feed, "call", rollout_id=name, task_id="t1", seq=0, agent="writer", status="ok", policy_version=0)
        assert seen.data["finish_reason"] == "stop" and seen.data["latency_ms"] > 0
        posted = proxy.post("/reward", {"rollout_id": name, "reward": 0.5, "source": "env"}).json
        until(feed, "reward", reward_id=posted["reward_id"], reward=0.5, source="env", call_id=None)
        seen = until(feed, "rollout", rollout_id=name, status="completed", reward=0.5)
    proxy.chat(f"{name}-2")
    for query, headers in ((f"?cursor={seen.n}", {}), ("", {"Last-Event-ID": f"{seen.n}"})):
        with reading(proxy, query, **headers) as feed:
            assert event(feed)[:2] == (seen.n, None)
            told = [(one.kind, one.data["rollout_id"]) for one in (event(feed), event(feed))]
            assert told == [("rollout", f"{name}-2"), ("call", f"{name}-2")]


@pytest.mark.feature("page")
def test_a_reader_learns_that_it_missed_something(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        for _ in range(11):
            assert proxy.post("/rollouts", {"n": 1000}).status == 200
        for cursor in (0, 10**9):  # forgotten: 10,000 events are kept; of another store
            with reading(proxy, f"?cursor={cursor}") as feed:
                assert event(feed).kind == "missed"
                proxy.chat(f"after-{cursor}")
                assert until(feed, "call").data["rollout_id"] == f"after-{cursor}"


@pytest.mark.feature("page")
def test_a_key_hears_of_what_it_may_see_for_as_long_as_it_is_one(tmp_path: Path) -> None:
    with in_this_process(tmp_path, proxy={"api_keys": ["all"]}) as proxy:
        own, other = (proxy.new_key(one, "--scope", "own") for one in ("ann", "bob"))
        assert proxy.call("GET", "/feed").status == 401
        (opened,) = proxy.post("/rollouts", {}, "all").json
        assert proxy.call("GET", "/feed", key=opened["api_key"]).status == 403
        with reading(proxy, Authorization=f"Bearer {own}") as feed:
            event(feed)
            proxy.chat("bobs", key=other)
            proxy.chat("anns", key=own)
            assert until(feed, "call").data["rollout_id"] == "anns"
            ok(proxy.run("keys", "revoke", "ann"))
            wait_until(lambda: proxy.call("GET", "/rollouts", key=own).status == 401, 30, "the key is gone")
            proxy.chat("after", key="all")
            rest = "\n".join(feed)
        assert "after" not in rest and "a valid API key is needed" in rest


@pytest.mark.feature("page")
def test_reading_takes_no_place_of_a_keys_requests_and_does_not_hold_up_the_end_of_the_proxy(tmp_path: Path) -> None:
    access = {"api_keys": ["key"], "limits": {"concurrent": 1}, "stop_timeout_s": 300}
    with served(tmp_path, proxy=access) as proxy, ExitStack() as stack:
        feeds = [stack.enter_context(reading(proxy, Authorization="Bearer key")) for _ in range(2)]
        assert [event(feed).kind for feed in feeds] == [None, None]
        assert proxy.chat("r1", key="key").status == 200
        assert [until(feed, "call").data["rollout_id"] for feed in feeds] == ["r1", "r1"]
        assert proxy.server.end(seconds=60) == 0
        assert "event: missed" not in [line for feed in feeds for line in feed]
