"""Shared fixtures: a clean environment, and a whole running system whose vLLM is played by `PolicyServer`."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
import yaml
from aiohttp import web
from aiohttp.typedefs import Handler
from hypothesis import settings

from contract.real import lora, merged, speller  # noqa: F401  (fixtures)
from lightning_proxy.commands.command_line import telemetry_off
from lightning_proxy.commands.serve import uvicorn_options
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.section import feature_sections
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.core.records import Limits
from lightning_proxy.proxy.app import create_app
from lightning_proxy.serving.mode import has_gpu
from lightning_proxy.serving.operator import KEY_HEADER
from lightning_proxy.serving.swap import swap_lock
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.store import Store
from support import fuzzing, network, reaper, stores  # noqa: F401  (fuzzing registers the profiles)
from support.command_line import Done, lightning
from support.features import has
from support.left_open import LeftOpen
from support.paths import ROOT
from support.postgres import postgres_server
from support.sections import with_features
from support.stores import store_url

WIDE = {"COLUMNS": "80"}

os.environ.update(telemetry_off())  # read when huggingface_hub is imported
# Several processes of tests share the cores: threads that wait for each other's cores take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.load_profile("quick")  # unless --hypothesis-profile names another
if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:
    reaper.start()


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
    items.sort(key=lambda item: "vllm" not in item.keywords)  # the longest first


@pytest.fixture(autouse=True, scope="module")
def left_open(request: pytest.FixtureRequest) -> Iterator[LeftOpen | None]:
    """A file whose tests leave files, pipes, sockets or processes fails, and not a test that runs later."""
    if request.node.get_closest_marker("vllm"):  # shared with other files
        yield None
        return
    left = LeftOpen()
    yield left
    assert not (found := left.at_last()), "\n".join(found)


@pytest.fixture(autouse=True)
def told_when_it_was_left_open(left_open: LeftOpen | None, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if left_open is not None:
        left_open.after(request.node.name)


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only what `make test` leaves out may ask other machines."""
    asked: list[str] = []
    network.watch(None if "long" in request.keywords else asked)
    yield
    network.watch(None)
    assert not asked, f"asked another machine: {', '.join(asked)}"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the settings of whoever runs it."""
    for name in list(os.environ):
        if name.startswith(("LIGHTNING_", "OPENAI_")):
            monkeypatch.delenv(name)
    yield


MOST_CHOICES = 128  # a fuzzer asks for more than fit in memory


class PolicyServer:
    """vLLM as the proxy's policy sees it: a base model, adapters, weights under a label, one chat route."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fails = 0  # the status of every answer, if it is to fail
        self.refuses = ""  # the path of an operator's request that is to fail
        self.base = "base"
        self.processed_logprobs, self.stable_template, self.returns_token_ids = True, True, True
        self.renders, self.takes_tokens, self.sees_files, self.parses_tools = True, True, True, True
        self.defaults: dict[str, Any] = {}  # its own sampling parameters
        self.delays: list[float] = []  # of the next answers, in seconds
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # the message, from the request
        self.restart()
        self.guarded = False  # as our own vLLM is, by OperatorGuard
        self.closed = False  # to us too: it was started with another operator's key
        self.plain = False  # without development mode
        self.odd: bytes | Handler | None = None  # every answer's body, or how models answer
        self.app = web.Application(middlewares=[self.oddly])
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_get("/weight_info", self.weight_info)
        self.app.router.add_get("/is_paused", self.is_paused)
        self.app.router.add_post("/v1/chat/completions", self.chat)
        self.app.router.add_post("/v1/chat/completions/render", self.render)
        self.app.router.add_post("/v1/chat/completions/derender", self.derender)
        self.app.router.add_post("/tokenize", self.tokenize)
        self.app.router.add_post("/detokenize", self.detokenize)
        for path in ("pause", "resume", "collective_rpc", "update_weight_version", "reset_prefix_cache"):
            self.app.router.add_post(f"/{path}", self.operate)
        self.app.router.add_post("/v1/load_lora_adapter", self.load)

    @web.middleware
    async def oddly(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if callable(self.odd) and request.path in ("/v1/completions", "/v1/chat/completions"):
            return await self.odd(request)
        if not isinstance(self.odd, bytes):
            return await handler(request)
        return web.Response(body=self.odd, content_type="application/json")

    def restart(self) -> None:
        """Forget everything, as vLLM does when it is started again."""
        self.adapters: dict[str, str] = {}
        self.weights, self.label, self.paused = str(self.root), "default", False

    async def models(self, _: web.Request) -> web.Response:
        base = {"id": self.base, "object": "model", "parent": None, "root": str(self.root)}
        base["max_model_len"] = 512  # type: ignore[assignment]
        adapters = [{"id": n, "object": "model", "parent": "base", "root": p} for n, p in self.adapters.items()]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def weight_info(self, _: web.Request) -> web.Response:
        if self.closed:
            return web.Response(status=401)
        if self.plain:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"weight_version": self.label})

    async def is_paused(self, request: web.Request) -> web.Response:
        if self.guarded and KEY_HEADER not in request.headers:
            return web.Response(status=401)
        return web.json_response({"is_paused": self.paused})

    async def operate(self, request: web.Request) -> web.Response:
        if request.path == self.refuses:
            return web.Response(status=500, text="out of memory")
        if request.path in ("/pause", "/resume"):
            self.paused = request.path == "/pause"
        elif request.path != "/update_weight_version":
            assert self.paused, "weights are replaced only while requests are frozen"
        if request.path == "/collective_rpc":
            self.weights = (await request.json())["kwargs"]["weights_path"]
        if request.path == "/update_weight_version":
            self.label = (await request.json())["new_version"]
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.closed or (self.guarded and KEY_HEADER not in request.headers):
            return web.Response(status=401)
        if request.path == self.refuses:
            error = {"message": "LoRA rank 64 is greater than max_lora_rank 16."}
            return web.json_response({"error": error}, status=400)
        if not self.sees_files or Path(body["lora_path"], "adapter_config.json").exists():  # without tensors
            said = "/x doesn't contain tensors" if self.sees_files else f"No adapter found for {body['lora_path']}"
            return web.json_response({"error": {"message": said}}, status=500 if self.sees_files else 404)
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="ok")

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.headers.append(dict(request.headers))
        await asyncio.sleep(self.delays.pop(0) if self.delays else 0)
        if self.fails:
            return web.json_response({"error": {"message": "busy"}}, status=self.fails)
        if body.get("tools") and not self.parses_tools:
            said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            return web.json_response({"error": {"message": said, "type": "BadRequestError", "code": 400}}, status=400)
        if body["model"] not in {"base", *self.adapters}:
            error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        if isinstance(body.get("n"), int) and body["n"] > MOST_CHOICES:
            error = {"message": f"n must be at most {MOST_CHOICES}", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        message = {"role": "assistant", "content": f"by {body['model']} with {Path(self.weights).name}"}
        message = self.answer(body) if self.answer else message
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [5, 6]}
        temperature = body.get("temperature", 1.0) if self.processed_logprobs else 1.0
        top = [{"token": "a", "logprob": -0.5 / temperature}, {"token": "b", "logprob": -1.5 / temperature}]
        choice["logprobs"] = {"content": [entry | {"top_logprobs": top} for entry in top]}
        if not self.returns_token_ids:
            del choice["token_ids"]
        if body.get("stop"):
            choice["stop_reason"] = body["stop"][0]
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        choices = [choice | {"index": i} for i in range(body.get("n") or 1)]
        answer = {"id": f"x{len(self.headers)}", "object": "chat.completion", "created": 0, "model": body["model"]}
        answer |= {"choices": choices, "usage": usage}
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") if self.takes_tokens else None
        return web.json_response(answer | {"prompt_token_ids": given or [1, 2, 3]})

    async def render(self, request: web.Request) -> web.Response:
        if not self.renders:
            return web.json_response({}, status=403)
        most = (await request.json()).get("max_tokens") or 500
        parameters = {"max_tokens": most} if most != 16 else {}  # its default, which vLLM leaves out
        return web.json_response({"token_ids": [1, 2, 3], "sampling_params": self.defaults | parameters})

    async def derender(self, request: web.Request) -> web.Response:
        """The text is the tokens' numbers."""
        body = await request.json()
        (choice,) = body["generate_response"]["choices"]
        text = " ".join(map(str, choice["token_ids"]))
        made = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        made["logprobs"] = {"content": [{"token": "x", **entry} for entry in choice["logprobs"]["content"]]}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "usage": {}}
        return web.json_response(answer | {"choices": [made]})

    async def tokenize(self, request: web.Request) -> web.Response:
        """A byte is a token; a turn is its text and an end."""
        body = await request.json()
        if "prompt" in body:
            return web.json_response({"tokens": list(body["prompt"].encode())})
        text = "".join(f"<{m['role']}>{m['content']}|" for m in body["messages"]) + "<assistant>"
        return web.json_response({"tokens": list((text if self.stable_template else str(len(text)) + text).encode())})

    async def detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        return web.json_response({"prompt": bytes(tokens).decode(errors="replace")})


class System:
    """A running proxy, its configuration, and the policy server behind it."""

    def __init__(
        self, config: Config, server: uvicorn.Server, session: aiohttp.ClientSession, vllm: PolicyServer
    ) -> None:
        self.config, self.session, self.vllm = config, session, vllm
        self._server = server
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Stop the proxy, as at SIGTERM."""
        self._server.should_exit = True

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            names.setdefault("Content-Type", "application/json")
        async with self.session.request(method, self.url + path, data=data, headers=names) as answer:
            return answer.status, json.loads(await answer.text() or "null")

    async def lightning(self, *arguments: str | Path) -> Done:
        """The command line with this system's configuration; what leaves sockets behind has its own process."""
        config = self.config.model_dump(mode="json")
        config["proxy"]["port"] = int(self.url.rsplit(":", 1)[1])
        path = self.vllm.root / "system.yaml"
        path.write_text(yaml.safe_dump(config))
        if arguments[0] != "optimize":  # the reflecting model's client
            return await asyncio.to_thread(lightning, "--config", path, *arguments)
        command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(path), *map(str, arguments)]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=os.environ | WIDE)
        out, err = await asyncio.wait_for(process.communicate(), 200)
        assert process.returncode is not None
        return Done(process.returncode, out.decode(), err.decode())

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
        database = await open_database(self.config.store)
        try:
            yield Store(database)
        finally:
            await database.close()

    async def earlier_version(self, store: Store, directory: Path, adapters: Sequence[str] = ()) -> int:
        """A version that was live once and can be promoted again.

        The proxy's watch must not see it live: no server was ever given its weights.
        """
        publish = self.config.policy.publish
        assert publish != "auto"
        version = await store.versions.new(publish, 1, {})
        path = directory / f"v{version}"
        for part in (path, *(path / name for name in adapters)):
            part.mkdir()
        served = f"policy-v{version}"
        await store.versions.saved(version, str(path), served, {name: f"{served}.{name}" for name in adapters})
        async with swap_lock(Path(self.config.policy.directory)):
            await store.versions.set_live(version, 1)
            await store.versions.set_live(0)
        return version

    async def candidate(self, store: Store, directory: Path) -> int:
        """A version that is tested against the live one. Merged, no server has its weights yet."""
        live = (await store.versions.live()).version
        version = await store.versions.new(self.config.policy.publish, 1, {})  # type: ignore[arg-type]
        path = directory / f"v{version}"
        path.mkdir()
        await store.versions.saved(version, str(path), f"policy-v{version}")
        from lightning_proxy.features.promotion.promotions import Promotions

        await Promotions(store.database).begin(version, 1, live)
        return version


SECTIONS = ("recording", "rollouts", "rewards", "trainer", "prices", *feature_sections())


def _config(
    root: Path,
    base_url: str,
    *,
    publish: str = "merged",
    continuity: str = "text",
    adapters: dict[str, list[str]] | None = None,
    policy: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    replicas: Sequence[str] = (),
    behind: Sequence[str] = (),
    fallbacks: Sequence[str] = (),
    others: Sequence[UpstreamConfig] = (),
    plugins: Sequence[str] = (),
    **given: Any,
) -> Config:
    """`given`: other sections, and keys of `proxy:`."""
    upstream = {"name": "policy", "base_url": base_url, "replicas": [*replicas], "fallbacks": [*fallbacks]}
    if behind:
        upstream |= {"servers": [*behind], "session_header": "X-Session-Id"}
    chosen = {"publish": publish, "token_continuity": continuity, "adapters": adapters or {}}
    return with_features(
        **{name: section for name in SECTIONS if (section := given.pop(name, None))},
        proxy=given,
        store={"url": store_url(root), **(store or {})},
        upstreams=[UpstreamConfig.model_validate(upstream), *others],
        policy={**chosen, "directory": root / "policy", **(policy or {})},
        plugins=list(plugins),
    )


@asynccontextmanager
async def _running(tmp_path: Path, **given: Any) -> AsyncIterator[System]:
    vllm = PolicyServer(tmp_path)
    runner = web.AppRunner(vllm.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = _config(tmp_path, f"http://127.0.0.1:{runner.addresses[0][1]}/v1", **given)
    server = uvicorn.Server(uvicorn.Config(create_app(config), **uvicorn_options(config.proxy) | {"port": 0}))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        async with aiohttp.ClientSession() as session:
            yield System(config, server, session, vllm)
    finally:
        server.should_exit = True
        await task
        await runner.cleanup()


@pytest.fixture(scope="session")
def running() -> Callable[..., AbstractAsyncContextManager[System]]:
    """`async with running(tmp_path, publish="lora", recording={…}) as system:`; more arguments are keys of `proxy:`.

    `otel`, `rollouts`, `rewards`, `store`, `policy`, `trainer`: these sections; `replicas`, `fallbacks`: of the
    policy's upstream; `others`: further upstreams; `behind`: servers behind the policy's, which is a router then.
    """
    return _running


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights."""
    from support.small_model import save_small_model  # loads torch

    return save_small_model(tmp_path_factory.mktemp("base"))
