"""Two `serve` processes over one PostgreSQL: what one of them writes, the other one knows."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
import yaml

from contract.system import free_port
from lightning_proxy.core.config.root import Config
from support import stores
from support.stores import postgres_server


@asynccontextmanager
async def several(config: Config, directory: Path, count: int) -> AsyncIterator[list[str]]:
    """Run `serve` so many times, each on a port of its own; yields their addresses."""
    processes, urls = [], []
    try:
        for _ in range(count):
            settings: dict[str, Any] = config.model_dump(mode="json")
            settings["proxy"]["port"] = port = free_port()
            path = directory / f"serve-{port}.yaml"
            path.write_text(yaml.safe_dump(settings))
            argv = (sys.executable, "-m", "lightning_proxy.cli", "--config", str(path), "serve")
            processes.append(await asyncio.create_subprocess_exec(*argv))
            urls.append(f"http://127.0.0.1:{port}")
        await asyncio.gather(*map(_answers, urls, processes))
        yield urls
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in processes))


async def _answers(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/healthz"):
                    return
            if process.returncode is not None:
                break
            await asyncio.sleep(0.1)
    pytest.fail("the proxy did not start")


pytestmark = pytest.mark.asyncio(loop_scope="module")
Running = Callable[..., AbstractAsyncContextManager[Any]]
OWN, BETTER = "You are a writer.", "You are a careful writer."


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """The stores of these tests are on a server, whatever `--store` says."""
    if stores.server is not None:
        yield
        return
    with postgres_server() as stores.server:
        yield
    stores.server = None


class Answer(NamedTuple):
    """A call's answer: its rollout, its policy version, what the model said, and the status."""

    rollout: str
    version: str
    said: str
    status: int


class Two:
    """Two proxies, the policy's server behind both, and what that was shown."""

    def __init__(self, system: Any, urls: list[str], session: aiohttp.ClientSession) -> None:
        self.system, self.urls, self.session = system, urls, session
        self.seen: list[Any] = []
        system.vllm.answer = self._answer

    def _answer(self, body: Any) -> dict[str, str]:
        self.seen.append(body["messages"])
        return {"role": "assistant", "content": f"answer {len(self.seen)} of {body['model']}"}

    async def ask(self, proxy: int, messages: list[Any], path: str = "", **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"model": "policy", "messages": messages}
        url = f"{self.urls[proxy]}{path}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=names) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"] if answer.status == 200 else ""
            get = answer.headers.get
            return Answer(get("X-Rollout-Id", ""), get("X-Policy-Version", ""), said, answer.status)

    async def call(self, proxy: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        async with self.session.request(method, self.urls[proxy] + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(running: Running, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    directory = tmp_path_factory.mktemp("two")
    async with (
        running(directory, publish="lora") as system,
        several(system.config, directory, 2) as urls,
        aiohttp.ClientSession() as session,
    ):
        yield Two(system, urls, session)


@pytest.fixture
def two(both: Two) -> Two:
    both.seen.clear()
    return both


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def soon(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is so. The proxies are told at once; the machine may be busy."""
    async with asyncio.timeout(20):
        while not await is_so():
            await asyncio.sleep(0.05)


async def test_a_promotion_counts_everywhere_and_rollouts_keep_what_they_began_with(two: Two, tmp_path: Path) -> None:
    async with two.system.store() as store:
        version = await two.system.earlier_version(store, tmp_path)
    assert (await two.ask(0, [user("a")], X_Rollout_Id="begun")).version == "0"
    status, promoted = await two.call(1, "POST", "/policy/promote", {"version": version})
    assert (status, promoted["live"]) == (200, True)
    for proxy in (0, 1):
        assert (await two.ask(proxy, [user("b")])).version == str(version)
        assert (await two.ask(proxy, [user("c")], X_Rollout_Id="begun")).version == "0"


async def test_a_prompt_and_its_promotion_count_everywhere(two: Two) -> None:
    status, _ = await two.call(0, "POST", "/prompts", {"name": "writer", "text": OWN, "match": {"agent": "writer"}})
    assert status == 200
    await two.call(0, "POST", "/prompts", {"name": "writer", "text": BETTER, "parent": 1})
    turns = iter(range(1000))

    async def shown(proxy: int) -> str:
        system = {"role": "system", "content": "Today is Monday."}
        await two.ask(proxy, [system, user("w")], X_Rollout_Id=f"r{next(turns)}", X_Agent_Name="writer")
        return str(two.seen[-1][0]["content"])

    async def placed() -> bool:
        return await shown(1) == OWN

    await soon(placed)
    assert (await two.call(0, "POST", "/prompts/writer/promote", {"version": 2}))[0] == 200
    assert await shown(1) == BETTER


async def test_a_feed_shows_what_happens_through_another_proxy(two: Two) -> None:
    happened: list[str] = []
    async with two.session.get(f"{two.urls[1]}/feed") as feed, asyncio.timeout(20):
        await feed.content.readline()  # it has begun
        await two.ask(0, [user("a")], X_Rollout_Id="seen")
        await two.call(0, "POST", "/reward", {"rollout_id": "seen", "reward": 1})
        while not {"call", "reward", "rollout"} <= {*happened}:
            line = (await feed.content.readline()).decode()
            happened += [line.removeprefix("event:").strip()] if line.startswith("event:") else []


async def test_keys_are_known_everywhere_and_forgotten_everywhere(two: Two) -> None:
    status, (opened,) = await two.call(0, "POST", "/rollouts", {"task_id": "t"})
    own = {"Authorization": f"Bearer {opened['api_key']}"}
    assert status == 200
    assert (await two.ask(1, [user("a")], **own)).rollout == opened["rollout_id"]
    made = await two.system.lightning("keys", "create", "agent")
    key = {"Authorization": f"Bearer {made.stdout.strip().splitlines()[-1]}"}

    async def closed() -> bool:
        return [(await two.call(proxy, "GET", "/rollouts"))[0] for proxy in (0, 1)] == [401, 401]

    await soon(closed)
    assert [(await two.ask(proxy, [user("b")], **key)).status for proxy in (0, 1)] == [200, 200]
    await two.system.lightning("keys", "revoke", "agent")

    async def revoked() -> bool:
        return [(await two.ask(proxy, [user("c")], **key)).status for proxy in (0, 1)] == [401, 401]

    await soon(revoked)
