"""Token continuity through a whole proxy; vLLM is played, with answers whose text is tokenised differently again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from lightning_proxy.proxy.app import create_app
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.conversation.exact import RecentTurns
from lightning_proxy.proxy.conversation.turns import AsText
from lightning_proxy.proxy.conversation.turns import turns as turns_of
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.opening import open_database
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, ModelCall, RolloutName
from lightning_proxy.trainer.rows.samples import rollout_samples
from support.sections import PolicyConfig

Json = dict[str, Any]
END = 0
PAIR = 256  # the tokenizer makes one token of "ll"; the model writes two


def tokenize(text: str) -> list[int]:
    ids = list(text.replace("ll", "\x01").replace("|", "\x00").encode())
    return [PAIR if token == 1 else token for token in ids]


def render(body: Json) -> list[int]:
    text = "".join(f"<{m['role']}>{m['content']}|" for m in body["messages"])
    return tokenize(text + "<assistant>" * body.get("add_generation_prompt", True))


class DriftingServer:
    """vLLM as a chat's continuity sees it. What it answers is the number of the call and `hello`, a byte a token."""

    def __init__(self) -> None:
        self.bodies: list[Json] = []
        self.render_status, self.refuses_tokens, self.ignores_tokens = 200, False, False
        self.renders, self.says = 0, "hello"
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_get("/weight_info", self.weight_info)
        self.app.router.add_get("/is_paused", self.is_paused)
        self.app.router.add_post("/v1/chat/completions", self.chat)
        self.app.router.add_post("/v1/chat/completions/render", self.render)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base", "parent": None, "root": "/base"}]})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": False})

    async def render(self, request: web.Request) -> web.Response:
        self.renders += 1
        assert request.headers["Authorization"] == "Bearer mine"
        body = {"token_ids": render(await request.json())} if self.render_status == 200 else {"error": {}}
        return web.json_response(body, status=self.render_status)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given and self.refuses_tokens:
            return web.json_response({"error": {"message": "no tokens, please"}}, status=400)
        prompt = render(body) if given is None or self.ignores_tokens else given
        text = f"{len(self.bodies)} {self.says}"
        ids = [*text.encode(), END]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        logprobs = [{"token": "", "logprob": -0.5} for _ in ids]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": logprobs}}
        message = {"role": "assistant", "content": text}
        top = {"id": "x", "model": "base", "prompt_token_ids": prompt, "usage": usage}
        if not body.get("stream"):
            return web.json_response(top | {"choices": [choice | {"message": message}]})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(f"data: {json.dumps(top | {'choices': [choice | {'delta': message}]})}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


class Proxy:
    def __init__(self, url: str, store: Path, session: aiohttp.ClientSession, vllm: DriftingServer) -> None:
        self.url, self.store, self.session, self.vllm = url, store, session, vllm

    async def ask(self, messages: list[Json], rollout: str = "r", **more: Any) -> Json:
        """The answer's message."""
        url = f"{self.url}/rollouts/{rollout}/v1/chat/completions"
        body = {"model": "policy", "messages": messages, **more}
        async with self.session.post(url, json=body, headers={"Authorization": "Bearer mine"}) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        whole = json.loads(text.split("\n\n")[0].removeprefix("data: "))
        assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (None, None)
        message: Json = whole["choices"][0].get("message") or whole["choices"][0]["delta"]
        return message

    async def outcomes(self) -> dict[str, int]:
        async with self.session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found = (line.split(" ") for line in lines if line.startswith("lightning_token_continuity_total{"))
        return {labels.split('"')[1]: int(float(value)) for labels, value in found}

    async def rows(self, rollout: str = "r") -> int:
        """How many training rows the rollout makes."""
        database = await open_database(StoreConfig(url=f"sqlite:///{self.store}"))
        try:
            calls = await Store(database).calls.of(rollout)
        finally:
            await database.close()
        assert all(call.trainable for call in calls)
        return len(rollout_samples(calls, [1.0] * len(calls), task_id=None, max_tokens=10_000).samples)


@asynccontextmanager
async def served(tmp_path: Path, vllm: DriftingServer, continuity: Any = "exact") -> AsyncIterator[Proxy]:
    runner = web.AppRunner(vllm.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    store = tmp_path / "store.db"
    config = Config(
        store=StoreConfig(url=f"sqlite:///{store}"),
        upstreams=[UpstreamConfig(name="policy", base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1")],
        policy=PolicyConfig(publish="merged", directory=tmp_path / "policy", token_continuity=continuity),
    )
    server = uvicorn.Server(uvicorn.Config(create_app(config), port=0, log_level="warning", access_log=False))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        async with aiohttp.ClientSession() as session:
            yield Proxy(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", store, session, vllm)
    finally:
        server.should_exit = True
        await task
        await runner.cleanup()


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def talk(proxy: Proxy, turns: int, messages: list[Json], **more: Any) -> list[Json]:
    for number in range(turns):
        messages = [*messages, user(f"all {number}")]
        messages = [*messages, await proxy.ask(messages, **more)]
    return messages


async def test_as_text_a_conversation_drifts_into_several_rows(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer(), "text") as proxy:
        await talk(proxy, 3, [])
        assert (await proxy.rows(), await proxy.outcomes(), proxy.vllm.renders) == (3, {}, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_is_one_row_and_its_text_is_the_same(tmp_path: Path, stream: bool) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        messages = await talk(proxy, 4, [], stream=stream)
        assert [m["content"] for m in messages[1::2]] == [f"{n} hello" for n in (1, 2, 3, 4)]
        assert (await proxy.rows(), await proxy.outcomes()) == (1, {"first": 1, "exact": 3})
        assert (
            proxy.vllm.renders == 2 * 3 + 2
        )  # two a turn, at the same time, and once what the template puts after one


async def test_branches_and_rollouts_go_on_each_with_its_own(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        shared = await talk(proxy, 2, [])
        await asyncio.gather(*(talk(proxy, 2, shared) for _ in range(3)))
        await talk(proxy, 2, [], rollout="other")
        assert await proxy.rows("other") == 1
        assert await proxy.outcomes() == {"first": 2, "exact": 1 + 6 + 1}
        assert await proxy.rows() == 3


async def test_any_number_of_branches_go_on_from_one_turn(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        shared = await talk(proxy, 1, [])
        for number in range(12):
            await proxy.ask([*shared, user(f"{number}")])
        assert await proxy.outcomes() == {"first": 1, "exact": 12}
        assert {body["model"] for body in proxy.vllm.bodies} == {"base"}


async def test_after_a_restart_the_conversation_goes_on_exactly(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        messages = await talk(proxy, 2, [])
    async with served(tmp_path, DriftingServer()) as proxy:
        await talk(proxy, 2, messages)
        assert (await proxy.rows(), await proxy.outcomes()) == (1, {"exact": 2})


async def test_several_workers_share_a_conversation(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as one, served(tmp_path, DriftingServer()) as other:
        messages: list[Json] = []
        for proxy in (one, other, one, other, other, one):
            messages = await talk(proxy, 1, messages)
        assert await one.rows() == 1
        assert (await one.outcomes(), await other.outcomes()) == ({"first": 1, "exact": 2}, {"exact": 3})


async def test_what_cannot_be_exact_goes_as_text_and_is_counted(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        told = await talk(proxy, 1, [])
        await proxy.ask([*told[:-1], {"role": "assistant", "content": "No."}, user("more")])
        await proxy.ask([*told, user("more")], tools=[{"type": "function", "function": {"name": "f"}}])
        await proxy.ask([*told, user("more")], add_generation_prompt=True, truncate_prompt_tokens=500)
        assert all("kv_transfer_params" not in body for body in proxy.vllm.bodies)
        assert await proxy.outcomes() == {"first": 1, "edited": 1, "changed": 1, "unsupported": 1}


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"render_status": 403}, "unavailable"),
        ({"render_status": 500}, "refused"),
        ({"refuses_tokens": True}, "refused"),
        ({"ignores_tokens": True}, "ignored"),
    ],
)
async def test_a_server_that_does_not_play_along_costs_rows_and_no_answer(
    tmp_path: Path, fault: dict[str, Any], outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = DriftingServer()
    for name, value in fault.items():
        setattr(vllm, name, value)
    async with served(tmp_path, vllm) as proxy:
        await talk(proxy, 3, [])
        assert (await proxy.rows(), await proxy.outcomes()) == (3, {"first": 1, outcome: 2})
    hints = {"unavailable": "add --enable-scale-out", "ignored": "does not take prompts as tokens"}
    if outcome in hints:
        assert caplog.text.count(hints[outcome]) == 1


async def test_a_deleted_rollout_is_forgotten(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        messages = await talk(proxy, 1, [])
        await proxy.session.post(f"{proxy.url}/rollouts/r/end", json={"status": "discarded"})
        async with proxy.session.delete(f"{proxy.url}/rollouts/r") as answer:
            assert answer.status < 300
        await talk(proxy, 1, messages)
        assert await proxy.outcomes() == {"first": 2}


async def test_calls_that_are_not_recorded_go_as_they_are(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        told = await talk(proxy, 2, [])
        body = {"model": "policy", "messages": [*told, user("more")]}
        url, headers = f"{proxy.url}/rollouts/r/v1/chat/completions", {"X-Recording": "off"}
        async with proxy.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
        assert "kv_transfer_params" not in proxy.vllm.bodies[-1]
        assert await proxy.outcomes() == {"first": 1, "exact": 1}


async def test_other_apis_are_counted_as_they_are(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        async with proxy.session.post(f"{proxy.url}/v1/completions", json={"model": "policy", "prompt": "a"}) as answer:
            assert answer.status == 404  # the played server has no such route
        assert await proxy.outcomes() == {"unsupported": 1}


async def test_the_rollouts_that_were_quiet_the_longest_are_forgotten(tmp_path: Path) -> None:
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    recent = RecentTurns(Store(database), lambda call, known: call.request, recent=2, tokens=13)
    for name, kept in (("a", 1), ("b", 1), ("b", 2), ("b", 2), ("a", 2), ("c", 1)):
        asked = {"messages": [user("hi"), {"role": "assistant", "content": "ho"}, user("more")]}
        response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]}
        await recent.known(name, asked)
        recent.add(name, turns_of(asked, response, (1, 2), (Choice(0, (3,), (-1.0,), "stop"),), (1,)))
        assert len(await recent.known(name, asked)) == kept
    assert [len(await recent.known(name, asked)) for name in "bac"] == [0, 2, 1]
    await database.close()


async def test_only_the_newest_turns_are_made_of_a_stored_rollout_and_not_in_the_loops_thread(
    tmp_path: Path,
) -> None:
    asked: list[tuple[str, threading.Thread]] = []

    def chat_of(call: ModelCall, _: object) -> Json:
        asked.append((call.call_id, threading.current_thread()))
        return call.request

    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]}
    request = {"model": "m", "messages": [user("hi"), {"role": "assistant", "content": "ho"}, user("more")]}
    name, answer = RolloutName("r", None, None), (Choice(0, (3,), (-1.0,), "stop"),)
    async with Recorder(Store(database), merged=False) as recorder:
        for n in range(9):
            await recorder.start(CallStart(f"c{n}", name, "chat/completions", "m", 0, request, 0.0))
            await recorder.end(CallEnd(f"c{n}", "r", "ok", response, 200, (1, n), answer))
    turns = await RecentTurns(Store(database), chat_of, recent=2).known("r", request)
    assert [turn.ids.tolist() for turn in turns] == [[1, 7, 3], [1, 8, 3]]
    assert [call_id for call_id, _ in asked] == ["c8", "c7"]
    assert threading.main_thread() not in {thread for _, thread in asked}
    await database.close()


@pytest.mark.parametrize("earlier", [10, 1000])
async def test_an_edited_history_reads_the_rollout_once(
    earlier: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its length: after that, each call asks only whether another worker has answered."""
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    name, answer = RolloutName("r", None, None), (Choice(0, (3,), (-1.0,), "stop"),)
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]}
    edited = {"model": "m", "messages": [user("hi"), {"role": "assistant", "content": "edited"}, user("more")]}

    async def call(recorder: Recorder, call_id: str) -> None:
        await recorder.start(CallStart(call_id, name, "chat/completions", "m", 0, {"messages": [user("hi")]}, 0.0))
        await recorder.end(CallEnd(call_id, "r", "ok", response, 200, (1,), answer))

    read: list[str] = []
    for way in ("all", "quick"):
        run = getattr(database, way)
        monkeypatch.setattr(database, way, lambda sql, params=None, run=run: read.append(sql) or run(sql, params))
    async with Recorder(Store(database), merged=False) as mine, Recorder(Store(database), merged=False) as others:
        for n in range(earlier):
            await call(mine, f"c{n}")
        recent, statements = RecentTurns(Store(database), lambda call, known: call.request), []
        for n in range(6):
            read.clear()
            with pytest.raises(AsText, match="edited"):
                await recent.earlier("r", edited)
            statements.append(len(read))
            await call(mine, f"d{n}")
            recent.add("r", [], f"d{n}")
        assert statements[1:] == [1] * 5
        await call(others, "another worker's")
        read.clear()
        with pytest.raises(AsText, match="edited"):
            await recent.earlier("r", edited)
        assert len(read) == 2
    await database.close()


async def test_what_another_worker_answers_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout is read whole once; after that, the rows of the other worker's new calls, however long it is."""
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    name, messages, prompt = RolloutName("r", None, None), [user("hi")], (1,)
    async with Recorder(Store(database), merged=False) as mine, Recorder(Store(database), merged=False) as others:

        async def turn(recorder: Recorder, n: int) -> None:
            nonlocal messages, prompt
            said = {"role": "assistant", "content": f"answer {n}"}
            sampled = (Choice(0, (n + 2,), (-1.0,), "stop"),)
            request = {"model": "m", "messages": messages}
            await recorder.start(CallStart(f"c{n}", name, "chat/completions", "m", 0, request, 0.0))
            response = {"choices": [{"index": 0, "message": said}]}
            await recorder.end(CallEnd(f"c{n}", "r", "ok", response, 200, prompt, sampled))
            messages, prompt = [*messages, said, user("more")], (*prompt, n + 2, 1)

        for n in range(40):
            await turn((mine, others)[n % 2], n)
        recent, rows = RecentTurns(Store(database), lambda call, known: call.request), list[int]()
        await recent.known("r", {"messages": messages})
        run = database.all

        async def counted(sql: str, params: Any = None) -> Any:
            found = await run(sql, params)
            rows.append(len(found))
            return found

        monkeypatch.setattr(database, "all", counted)
        for n in range(40, 46):
            await turn((mine, others)[n % 2], n)
            found = await recent.earlier("r", {"model": "m", "messages": messages})
            assert (found.ids.tolist(), found.messages) == ([*prompt[:-1]], messages[:-2])
        assert rows == [1] * 6
    await database.close()


async def test_vllms_own_token_routes_are_no_agents_business(tmp_path: Path) -> None:
    async with served(tmp_path, DriftingServer()) as proxy:
        for path in ("/inference/v1/generate", "/rollouts/r/inference/v1/generate", "/v1/../inference/v1/generate"):
            async with proxy.session.post(proxy.url + path, json={"token_ids": [1]}) as answer:
                assert answer.status == 404
