"""Where the environment names an HTTP proxy, what goes to our proxy does not pass it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lightning_proxy import client
from lightning_proxy.client.program import reached_directly
from lightning_proxy.commands.run.run import RunOptions
from support.control_api import ControlApi
from support.http_proxy import http_proxy
from support.relaying import MemoryRecorder, relaying, speaking
from support.running import Program, run_all, task

Running = Callable[..., AbstractAsyncContextManager[Any]]

PASS = "Proxy-Authorization: Basic dXNlcjpwQHNz"
AGENT = """
import json, os, urllib.request
from lightning_proxy import client
from openai import OpenAI
messages = [{"role": "user", "content": "hi"}]
OpenAI().chat.completions.create(model="policy", messages=messages)
with client.current().openai() as llm:
    llm.chat.completions.create(model="policy", messages=messages)
body = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": 0.5, "final": False}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["LIGHTNING_URL"] + "/reward"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()
client.emit_reward(1.0)
"""


@pytest.mark.parametrize("options", [(), ("--preload", "json")], ids=["process", "preload"])
async def test_programs_of_run_ask_the_proxy_directly(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    tasks, agent = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    tasks.write_text('{"task_id": "t1"}\n')
    agent.write_text(AGENT)
    async with running(tmp_path) as system, http_proxy() as between:
        between.in_environment(monkeypatch)
        asked = ("--tasks", tasks, "--group-size", "1", "--json", *options, "--", sys.executable, agent)
        code, out, err = await system.lightning("run", *asked)
        assert (code, json.loads(out)["mean_reward"]) == (0, 1.0), err
        assert between.seen == []


async def test_what_the_user_keeps_from_the_http_proxy_stays_beside_our_host(
    proxy: ControlApi, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program.kind == "ray":
        program.run["ray"] |= {"runtime_env": {"env_vars": {"NO_PROXY": "mine.example,.corp"}}}  # type: ignore[operator]
    monkeypatch.setenv("NO_PROXY", "mine.example,.corp")
    monkeypatch.delenv("no_proxy", raising=False)
    text = "import os; print(os.environ['NO_PROXY'], os.environ['no_proxy'])"
    await run_all(proxy, program(tmp_path, text), [task(1)], RunOptions(logs=tmp_path / "logs"))
    assert (tmp_path / "logs" / "r0.log").read_text().split() == ["mine.example,.corp,127.0.0.1"] * 2


@pytest.mark.parametrize(
    ("url", "there", "upper", "lower"),
    [
        ("http://127.0.0.1:8080", {}, "127.0.0.1", "127.0.0.1"),
        ("http://proxy.example", {"no_proxy": "a, b"}, "a,b,proxy.example", "a,b,proxy.example"),
        ("http://a", {"NO_PROXY": "a,b", "no_proxy": "c"}, "a,b", "c,a"),
        ("http://a", {"NO_PROXY": "*"}, "*", "*"),
        ("http://[::1]:8080", {}, "::1,[::1]", "::1,[::1]"),
    ],
)
def test_the_list_of_hosts_without_http_proxy_grows_by_ours(
    url: str, there: dict[str, str], upper: str, lower: str
) -> None:
    env = reached_directly({"LIGHTNING_URL": url}, there)
    assert (env["NO_PROXY"], env["no_proxy"]) == (upper, lower)


async def test_the_client_asks_the_proxy_directly(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]

    def agent(url: str) -> dict[str, str]:
        with client.rollout("r1", url=url) as run, run.openai() as llm:
            llm.chat.completions.create(model="policy", messages=messages)
            client.emit_reward(0.5, final=False)
            return run.environ

    async with running(tmp_path) as system, http_proxy() as between:
        between.in_environment(monkeypatch)
        environ = await asyncio.to_thread(agent, system.url)
        async with client.rollout("r2", url=system.url) as run, run.async_openai() as llm:
            await llm.chat.completions.create(model="policy", messages=messages)
        assert (between.seen, environ["NO_PROXY"]) == ([], "127.0.0.1")
        assert len((await system.call("GET", "/rollouts/r2"))[1]["calls"]) == 1


@pytest.mark.parametrize("trusts", [True, False])
async def test_an_upstream_is_asked_through_the_http_proxy_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusts: bool
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with http_proxy() as between, speaking(answer) as base:
        between.in_environment(monkeypatch)
        monkeypatch.setenv("http_proxy", between.url.replace("//", "//user:p%40ss@"))
        async with (
            relaying(base, MemoryRecorder(), kind="openai", api_key="sk-1", trust_env=trusts) as url,
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": []}) as reply,
        ):
            assert reply.status == 200
        assert [head.split()[1] for head in between.seen] == [f"{base}/v1/chat/completions"] * trusts
        assert all("secret" not in head and "Bearer sk-1" in head and PASS in head for head in between.seen)
