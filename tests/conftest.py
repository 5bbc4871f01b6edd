"""Shared fixtures: a clean environment, and a whole running system with a played vLLM."""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
import yaml
from hypothesis import settings

from contract.real import lora, merged, speller  # noqa: F401  (fixtures)
from contract.system import CLI, listening
from contract.vllm import PlayedVllm
from lightning_proxy.commands.command_line import telemetry_off
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.section import feature_sections
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.core.records import Limits
from lightning_proxy.serving.mode import has_gpu
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support import fuzzing, stores  # noqa: F401  (fuzzing registers the profiles)
from support.command_line import Done, lightning
from support.left_open import LeftOpen, start_reaper, watch
from support.paths import ROOT, has
from support.sections import with_features
from support.served import earlier_version, proxy_of, saved_version
from support.stores import postgres_server, store_url

os.environ.update(telemetry_off())  # read when huggingface_hub is imported
# Several processes of tests share the cores: threads that wait for each other's cores take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.load_profile("quick")  # unless --hypothesis-profile names another
if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:
    start_reaper()


@atexit.register
def keep_pytests_last_lines() -> None:
    """What packages in C say when the process ends, of objects that were not freed, is not shown."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # a third of the time of the imports
    try:
        return (yield)
    finally:
        gc.enable()


class _Hasty:
    """asyncio as uvicorn's server has it: it looks every 5 ms whether it is to end, not every 100."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 20)


vars(uvicorn.server)["asyncio"] = _Hasty()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", choices=("sqlite", "postgres"), default="sqlite", help="the store of most tests")


@pytest.fixture(autouse=True, scope="session")
def store_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--store postgres`, the server that has the stores of tests."""
    if request.config.getoption("--store") == "sqlite":
        yield
        return
    with postgres_server() as stores.server:
        yield
    stores.server = None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks what only `make test-all` runs; of several processes, one runs all tests of a file."""
    file = item.path.relative_to(ROOT)
    if file.is_relative_to("tests/long"):
        item.add_marker(pytest.mark.long)
    if "sqlite" in item.keywords and item.config.getoption("--store") != "sqlite":
        item.add_marker(pytest.mark.skip(reason="about SQLite"))
    for marker in item.iter_markers("feature"):
        if not has(*marker.args):
            item.add_marker(pytest.mark.skip(reason=f"without the feature {marker.args[0]}"))
    if "gpu" in item.keywords and not has_gpu():
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(str(file)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ("vllm" not in item.keywords, "long" not in item.keywords))  # the longest first


@pytest.fixture(autouse=True, scope="module")
def left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file fails that leaves files, pipes, sockets or processes, and not a test that runs later."""
    left = LeftOpen()
    yield
    if not request.node.get_closest_marker("vllm"):  # shared with other files
        assert not (found := left.at_last()), "\n".join(found)


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only what `make test` leaves out may ask other machines."""
    asked: list[str] = []
    watch(None if "long" in request.keywords else asked)
    yield
    watch(None)
    assert not asked, f"asked another machine: {', '.join(asked)}"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the settings of whoever runs it."""
    for name in list(os.environ):
        if name.startswith(("LIGHTNING_", "OPENAI_")):
            monkeypatch.delenv(name)
    yield


class System:
    """A running proxy, its configuration, and the policy server behind it."""

    def __init__(self, config: Config, url: str, session: aiohttp.ClientSession, vllm: PlayedVllm) -> None:
        self.config, self.url, self.session, self.vllm = config, url, session, vllm

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            names.setdefault("Content-Type", "application/json")
        async with self.session.request(method, self.url + path, data=data, headers=names) as answer:
            return answer.status, json.loads(await answer.text() or "null")

    async def get(self, path: str, **headers: str) -> Any:
        """The answer of a request that is not refused; so does `post`."""
        status, answer = await self.call("GET", path, **headers)
        assert status < 300, answer
        return answer

    async def post(self, path: str, body: Any = None, **headers: str) -> Any:
        status, answer = await self.call("POST", path, body, **headers)
        assert status < 300, answer
        return answer

    async def lightning(self, *arguments: str | Path) -> Done:
        """The command line with this system's configuration; what leaves sockets behind has its own process."""
        config = self.config.model_dump(mode="json")
        config["proxy"]["port"] = int(self.url.rsplit(":", 1)[1])
        path = self.vllm.root / "system.yaml"
        path.write_text(yaml.safe_dump(config))
        if arguments[0] != "optimize":  # the reflecting model's client
            return await asyncio.to_thread(lightning, "--config", path, *arguments)
        command = [*CLI, "--config", path, *map(str, arguments)]
        wide = os.environ | {"COLUMNS": "80"}
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=wide, timeout=200)
        return Done(done.returncode, done.stdout, done.stderr)

    async def chat(self, rollout_id: str, **headers: str) -> tuple[int, Any]:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        return await self.call("POST", f"/rollouts/{rollout_id}/v1/chat/completions", body, **headers)

    async def key(self, name: str, role: Any = "agent", **more: Any) -> dict[str, str]:
        """The header of a new key, once the proxy knows it."""
        async with self.store() as store:
            key, _ = await store.keys.create(name, role, Limits(), recording=True, **more)
        header = {"Authorization": f"Bearer {key}"}
        async with asyncio.timeout(10):
            while [(await self.call("GET", "/rollouts", **one))[0] for one in ({}, header)] != [401, 200]:
                await asyncio.sleep(0.05)
        return header

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        """The trainer's side of the store, as another process has it."""
        async with opened(self.config.store) as database:
            yield Store(database)

    async def earlier_version(self, store: Store, directory: Path, adapters: Sequence[str] = ()) -> int:
        """A version that was live once and can be promoted again."""
        return await earlier_version(self.config, store, directory, adapters)

    async def candidate(self, store: Store, directory: Path) -> int:
        """A version that is tested against the live one. Merged, no server has its weights yet."""
        from lightning_proxy.features.promotion.promotions import Promotions

        live = (await store.versions.live()).version
        version = await saved_version(store, self.config.policy.publish, directory)
        await Promotions(store.database).begin(version, 1, live)
        return version


SECTIONS = ("recording", "rollouts", "rewards", "trainer", "prices", *feature_sections())


@asynccontextmanager
async def _running(
    tmp_path: Path,
    *,
    publish: str = "merged",
    continuity: str = "text",
    adapters: Any = (),
    policy: Any = (),
    store: Any = (),
    replicas: Sequence[str] = (),
    behind: Sequence[str] = (),
    others: Sequence[UpstreamConfig] = (),
    plugins: Sequence[str] = (),
    **given: Any,
) -> AsyncIterator[System]:
    vllm = PlayedVllm(tmp_path)
    async with listening(vllm.app) as root:
        upstream = {"name": "policy", "base_url": f"{root}/v1", "replicas": [*replicas]}
        if behind:
            upstream |= {"servers": [*behind], "session_header": "X-Session-Id"}
        chosen = {"publish": publish, "token_continuity": continuity, "adapters": dict(adapters)}
        config = with_features(
            **{name: section for name in SECTIONS if (section := given.pop(name, None))},
            proxy=given,
            store={"url": store_url(tmp_path), **dict(store)},
            upstreams=[UpstreamConfig.model_validate(upstream), *others],
            policy={**chosen, "directory": tmp_path / "policy", **dict(policy)},
            plugins=list(plugins),
        )
        async with proxy_of(config) as url, aiohttp.ClientSession() as session:
            yield System(config, url, session, vllm)


@pytest.fixture(scope="session")
def running() -> Callable[..., AbstractAsyncContextManager[System]]:
    """`async with running(tmp_path, publish="lora", recording={…}) as system:`; more arguments are keys of `proxy:`.

    `otel`, `rollouts`, `rewards`, `store`, `policy`, `trainer`: these sections; `replicas`: of the policy's upstream;
    `others`: further upstreams; `behind`: servers behind the policy's, which is a router then.
    """
    return _running


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[System]]:
    """`running` in this test's directory."""
    return partial(_running, tmp_path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights."""
    from support.models import save_small_model  # loads torch

    return save_small_model(tmp_path_factory.mktemp("base"))
