"""What an attacker sends, over raw sockets, to the proxy as `serve` runs it; and what a bad upstream answers.

The upstream of these tests tells what reached it. None of it may be more than one request, or another one, than was
checked; and the upstream's key, which the proxy alone knows, may be nowhere.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import uvicorn
from aiohttp import web

from lightning_proxy.commands.serve import uvicorn_options
from lightning_proxy.proxy.app import create_app
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import RecordingConfig, StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from support.cases import Case, cases_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "sk-upstream-5c1dD0nTl3akM3pl34s3"
SECRET = "sk-proj-Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6"
BODY = b'{"model":"m","messages":[]}'
TYPE = b"Content-Type: application/json\r\n"
HOST = b"Host: 127.0.0.1\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/embeddings HTTP/1.1\r\n" + HOST + TYPE
STATUS_LINE = b"HTTP/1.1 "
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@dataclass
class Upstream:
    """Keeps what reached it; answers as the test says."""

    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=lambda: [b"{}"])
    breaks: bool = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.method, request.raw_path, headers, await request.read()))
        response = web.StreamResponse(status=self.status, headers={"Content-Type": "application/json"} | self.headers)
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0.001)
        if self.breaks and request.transport is not None:
            request.transport.abort()
        return response


@dataclass
class Proxy:
    port: int
    upstream: Upstream
    directory: Path
    session: aiohttp.ClientSession

    async def send(self, data: bytes, answers: int = 1) -> list[bytes]:
        """The answers to what is sent over one connection: as many as are to be expected, and those beyond them."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        out = b""
        try:
            writer.write(data)
            while piece := await asyncio.wait_for(reader.read(65536), 0.1 if out.count(STATUS_LINE) >= answers else 10):
                out += piece
        except (TimeoutError, ConnectionResetError):
            pass
        finally:
            writer.close()
        return [STATUS_LINE + part for part in out.split(STATUS_LINE)[1:]]

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.session.post(url, json=body or json.loads(BODY), headers=headers, allow_redirects=False) as got:
            return got.status, {name.lower(): value for name, value in got.headers.items()}, await got.read()

    def stored(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.directory.glob("s.db*"))


@asynccontextmanager
async def serving(directory: Path, base_url: str) -> AsyncIterator[int]:
    """A proxy in front of this upstream; its port."""
    upstream = {"name": "u", "kind": "openai", "base_url": base_url, "api_key": KEY}
    config = Config(
        recording=RecordingConfig.model_validate({"redact": {"secrets": True}}),
        store=StoreConfig(url=f"sqlite:///{directory}/s.db"),
        upstreams=[UpstreamConfig.model_validate(upstream)],
    )
    assert KEY not in repr(config) + config.model_dump_json()
    server = uvicorn.Server(uvicorn.Config(create_app(config), **uvicorn_options(config.proxy) | {"port": 0}))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxy]:
    upstream, app, directory = Upstream(), web.Application(), tmp_path_factory.mktemp("attacks")
    app.router.add_route("*", "/{path:.*}", upstream.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    async with serving(directory, base_url) as port, aiohttp.ClientSession() as session:
        yield Proxy(port, upstream, directory, session)
    await runner.cleanup()


@pytest.fixture
def proxy(served: Proxy) -> Proxy:
    """One proxy for all tests; its upstream is as new for each."""
    upstream = served.upstream
    upstream.seen, upstream.status, upstream.headers, upstream.pieces, upstream.breaks = [], 200, {}, [b"{}"], False
    return served


def statuses(answers: list[bytes]) -> list[int]:
    return [int(answer.split(b" ")[1]) for answer in answers]


# One request or none -------------------------------------------------------------------------------------------------

AMBIGUOUS = {
    "CL.TE": LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "TE.CL": b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n27\r\n" + SMUGGLED + b"\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 4\r\n" + LENGTH + b"\r\n" + BODY,
    "the same length twice": LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": b"Content-Length: 27, 27\r\n\r\n" + BODY,
    "a signed length": b"Content-Length: +27\r\n\r\n" + BODY,
    "a hexadecimal length": b"Content-Length: 0x1b\r\n\r\n" + BODY,
    "a negative length": b"Content-Length: -1\r\n\r\n" + BODY,
    "a length with a space": b"Content-Length: 2 7\r\n\r\n" + BODY,
    "a length too large for 64 bits": b"Content-Length: 18446744073709551643\r\n\r\n" + BODY,
    "obs-fold": LENGTH + b"X-A: b\r\n c: d\r\n\r\n" + BODY,
    "a folded encoding": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a bare LF": LENGTH + b"X-A: b\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
    "a bare CR": LENGTH + b"X-A: b\rTransfer-Encoding: chunked\r\n\r\n" + BODY,
    "NUL": LENGTH + b"X-A: b\x00c\r\n\r\n" + BODY,
    "a space before the colon": b"Content-Length : 27\r\n\r\n" + BODY,
    "an encoding with a space before the colon": LENGTH + b"Transfer-Encoding : chunked\r\n\r\n" + BODY,
    "no colon": LENGTH + b"foo\r\n\r\n" + BODY,
    "no name": LENGTH + b": foo\r\n\r\n" + BODY,
    "chunked, identity": b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED,
    "identity": LENGTH + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "identity, chunked": b"Transfer-Encoding: identity, chunked\r\n\r\n" + CHUNKED,
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED,
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "chunked and then not": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "an encoding like chunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "an encoding behind a tab": LENGTH + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + BODY,
    "a chunk's size in 0x": b"Transfer-Encoding: chunked\r\n\r\n0x1b\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk's size too large": b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + BODY,
    "a chunk's extension with LF": b"Transfer-Encoding: chunked\r\n\r\n1b;\n" + BODY + b"\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_what_could_be_read_in_two_ways_is_refused(proxy: Proxy, name: str) -> None:
    answers = await proxy.send(POST + AMBIGUOUS[name])
    assert statuses(answers)[:1] == [400]
    assert json.loads(answers[0].partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert [seen for seen in proxy.upstream.seen if b"smuggled" in seen[3] or "smuggled" in seen[1]] == []
    assert proxy.upstream.seen == []


async def test_nothing_is_chunked_in_http_1_0(proxy: Proxy) -> None:
    data = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    assert statuses(await proxy.send(data)) == [400] and proxy.upstream.seen == []


@pytest.mark.parametrize("line_end", [b"\n", b"\r"])
async def test_lines_end_with_both_characters(proxy: Proxy, line_end: bytes) -> None:
    answers = await proxy.send((POST + LENGTH + b"\r\n").replace(b"\r\n", line_end) + BODY)
    assert statuses(answers) in ([400], []) and proxy.upstream.seen == []


async def test_what_is_chunked_arrives_as_one_body_of_one_length(proxy: Proxy) -> None:
    one = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert statuses(await proxy.send(one + CHUNKED + one + b"1b;a=b\r\n" + BODY + b"\r\n0\r\n\r\n", 2)) == [200, 200]
    for _, _, headers, body in proxy.upstream.seen:
        assert body == BODY and headers["content-length"] == "27" and "transfer-encoding" not in headers


async def test_trailers_are_no_headers(proxy: Proxy) -> None:
    trailers = b"X-Rollout-Id: evil\r\nX-Evil: 1\r\nAuthorization: Bearer evil\r\n\r\n"
    for piece in (b"", b"\r\n"):
        data = POST.replace(b"embeddings", b"chat/completions") + b"Transfer-Encoding: chunked\r\n\r\n"
        answers = await proxy.send(data + CHUNKED.removesuffix(b"\r\n") + trailers + piece)
        assert statuses(answers) == [200] and b"x-rollout-id: evil" not in answers[0]
    assert all("x-evil" not in headers for _, _, headers, _ in proxy.upstream.seen)


async def test_a_request_that_asks_for_an_upgrade_is_answered_without_one(proxy: Proxy) -> None:
    """As some clients ask with every request; the body counts, and so does what comes after it."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    one = POST + upgrade + LENGTH + b"\r\n" + BODY
    assert statuses(await proxy.send(one + one, 2)) == [200, 200]
    assert [body for _, _, _, body in proxy.upstream.seen] == [BODY, BODY]
    assert all(not {"upgrade", "connection", "http2-settings"} & seen[2].keys() for seen in proxy.upstream.seen)


async def test_a_websocket_is_refused_in_words(proxy: Proxy) -> None:
    socket = b"Connection: Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n\r\n"
    answers = await proxy.send(b"GET /v1/realtime HTTP/1.1\r\n" + HOST + socket)
    assert statuses(answers) == [426] and b"WebSockets are not forwarded" in answers[0]
    assert proxy.upstream.seen == []


@pytest.mark.parametrize("case", cases_with("method", "request_headers"), ids=lambda case: case["name"])
async def test_what_a_client_tries_first_is_answered_as_its_protocol_says(proxy: Proxy, case: Case) -> None:
    head = "".join(f"{name}: {value}\r\n" for name, value in case["request_headers"].items()).encode()
    answers = await proxy.send(f"{case['method']} {case['path']} HTTP/1.1\r\n".encode() + HOST + head + b"\r\n")
    assert statuses(answers) == [case["status"]]


@pytest.mark.parametrize("case", cases_with("stream", "http_version"), ids=lambda case: case["name"])
async def test_a_client_of_http_1_0_gets_an_answer_without_chunks(proxy: Proxy, case: Case) -> None:
    proxy.upstream.headers = {"Content-Type": case.get("content_type", "text/event-stream")}
    proxy.upstream.pieces = [piece.encode() for piece in case["stream"]]
    body = json.dumps({"model": "m", "stream": True, "messages": []}).encode()
    head = b"POST %b HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (case["path"].encode(), HOST + TYPE, len(body))
    (answer,) = await proxy.send(head + body)
    head, _, got = answer.partition(b"\r\n\r\n")
    assert got == b"".join(proxy.upstream.pieces)
    assert b"transfer-encoding" not in head and b"connection: close" in head


async def test_a_client_of_http_1_0_sees_that_an_answer_broke_off(proxy: Proxy) -> None:
    proxy.upstream.headers, proxy.upstream.breaks = {"Content-Type": "text/event-stream"}, True
    proxy.upstream.pieces = [b'data: {"choices":[]}\n\n']
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    body = json.dumps({"model": "m", "stream": True, "messages": []}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_an_upgrade_split_at_any_byte_is_still_one_request(proxy: Proxy) -> None:
    data = POST + b"Connection: upgrade\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\n" + BODY
    for cut in (5, len(POST), len(data) - len(BODY), len(data) - 3):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for piece in (data[:cut], data[cut:]):
            writer.write(piece)
            await asyncio.sleep(0.02)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert [body for _, _, _, body in proxy.upstream.seen] == [BODY] * 4


# Size ----------------------------------------------------------------------------------------------------------------


async def test_a_large_head_is_passed_on(proxy: Proxy) -> None:
    head = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 7000) for i in range(4))
    assert statuses(await proxy.send(POST + head + LENGTH + b"\r\n" + BODY)) == [200]


# Paths, targets, methods ---------------------------------------------------------------------------------------------

HIDDEN = rb"""
/v1/load_lora_adapter /v1/../v1/load_lora_adapter /v1/./load_lora_adapter /v1/x/../load_lora_adapter
/v1/%2e%2e/pause /v1/%2E%2E%2Fpause /v1/..%2fpause /v1/%252e%252e/pause /v1/%25252e%25252e/pause /v1/%2525252e./x
/v1%2fload_lora_adapter /v1/x%2f..%2fload_lora_adapter /v1/load_lora_adapter; /v1/load_lora_adapter;a=b
/v1/;/load_lora_adapter /v1/load_lora_adapter%20 /v1/load_lora_adapter%09 /v1/load_lora_adapter%00
/v1/load_lora_adapter%0a /v1/LOAD_lora_adapter/ /v1/load_lora_adapter?x /v1/load_lora_adapter#x
/v1/%6coad_lora_adapter /v1/%256coad_lora_adapter /v1/%25256coad_lora_adapter /v1/load_lora_adapter/x
/v1\load_lora_adapter /v1/%5cload_lora_adapter /v1/x\..\load_lora_adapter //v1/load_lora_adapter
/v1//load_lora_adapter /v1/unload_lora_adapter /rollouts/a/v1/load_lora_adapter /rollouts/../v1/load_lora_adapter
/rollouts/a/tasks/b/agents/c/v1/../../pause /V1/load_lora_adapter /V1/files /v1 /pause /collective_rpc /is_paused
http://127.0.0.1/v1/load_lora_adapter https://evil.example:443/v1/load_lora_adapter http://evil.example/ * v1/files ?x
""".split()


@pytest.mark.parametrize("target", HIDDEN)
async def test_no_path_leads_to_an_operators_route(proxy: Proxy, target: bytes) -> None:
    answers = await proxy.send(b"POST " + target + b" HTTP/1.1\r\n" + HOST + TYPE + LENGTH + b"\r\n" + BODY)
    assert statuses(answers) in ([404], [400], [405])
    assert proxy.upstream.seen == []


@pytest.mark.parametrize(
    ("target", "asked_for"),
    [
        ("/v1/files/a%20b", "/v1/files/a%20b"),
        ("/v1/files/%E2%82%AC", "/v1/files/%E2%82%AC"),
        ("/v1/files/100%25", "/v1/files/100%25"),
        ("/v1/files/a%3Ab%2fc%2Fd%7e%25%zz", "/v1/files/a%3Ab%2fc%2Fd%7e%25%zz"),
        ("/rollouts/r%31/v1/files/a%2Fb", "/v1/files/a%2Fb"),
        ("/%76%31/files/a%2Fb", "/v1/files/a/b"),
        *((case["path"], case["upstream_path"]) for case in cases_with("upstream_path")),
        ("/v1/files?u=http://evil.example/&x=%0d%0aX:1", "/v1/files?u=http://evil.example/&x=%0d%0aX:1"),
        ("http://evil.example/v1/files", "/v1/files"),
        ("/v1/%c0%ae%c0%ae/x", "/v1/%EF%BF%BD%EF%BF%BD%EF%BF%BD%EF%BF%BD/x"),
    ],
)
async def test_what_was_checked_is_what_is_asked_for(proxy: Proxy, target: str, asked_for: str) -> None:
    data = b"POST " + target.encode() + b" HTTP/1.1\r\n" + HOST + TYPE + LENGTH + b"\r\n" + BODY
    assert statuses(await proxy.send(data)) == [200]
    assert [seen[1] for seen in proxy.upstream.seen] == [asked_for]


@pytest.mark.parametrize(
    "start",
    ["CONNECT evil.example:443", "CONNECT /v1/files", "OPTIONS *", "TRACE /v1/files", "PRI *", "post /v1/files"],
)
async def test_methods_of_proxies_and_of_debugging_go_nowhere(proxy: Proxy, start: str) -> None:
    answers = await proxy.send(f"{start} HTTP/1.1\r\n".encode() + HOST + b"\r\n")
    assert statuses(answers) in ([400], [404], [405])
    assert proxy.upstream.seen == []


async def test_a_redirect_is_the_agents_to_follow(proxy: Proxy) -> None:
    for status in (301, 302, 303, 307, 308):
        proxy.upstream.status, proxy.upstream.headers = status, {"Location": f"http://127.0.0.1:{proxy.port}/evil"}
        for path in ("/v1/files", "/v1/chat/completions"):
            proxy.upstream.seen.clear()
            got, headers, _ = await proxy.post(path)
            assert (got, headers["location"][-5:], len(proxy.upstream.seen)) == (status, "/evil", 1)


async def test_no_url_in_a_request_is_called(proxy: Proxy) -> None:
    called = []

    async def evil(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.append(await reader.readline())
        writer.close()

    trap = await asyncio.start_server(evil, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{trap.sockets[0].getsockname()[1]}/v1"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    body = {"model": url, "base_url": url, "api_base": url, "messages": [picture], "webhook": url}
    headers = {
        "X-Upstream": url,
        "X-Forwarded-Host": url,
        "Referer": url,
        "X-Base-Url": url,
        "Forwarded": f"host={url}",
    }
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/files"):
        assert (await proxy.post(path, body, **headers))[0] == 200
    await proxy.send(f"POST {url}/files HTTP/1.1\r\n".encode() + HOST + TYPE + LENGTH + b"\r\n" + BODY)
    trap.close()
    await trap.wait_closed()
    assert called == [] and len(proxy.upstream.seen) == 4


# Headers -------------------------------------------------------------------------------------------------------------

STRANGERS = rb"""
evil.example 127.0.0.1.evil.example 127.0.0.1@evil.example evil.example@127.0.0.1 localhost:80@evil.example
127.0.0.1:80/x 127.0.0.1\@evil.example 127.0.0.1#@evil.example 127.0.0.1?evil.example 127.1 2130706433 0.0.0.0
localhost.evil.example evil.localhost localhost. [::] [::ffff:8.8.8.8] 127.0.0.1,evil.example
""".split()


@pytest.mark.parametrize("host", [*STRANGERS, b""])
async def test_without_keys_no_other_host_is_served(proxy: Proxy, host: bytes) -> None:
    for path in (b"/v1/files", b"/rollouts", b"/v1/models", b"/policy"):
        assert statuses(await proxy.send(b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")) == [403]
    assert proxy.upstream.seen == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:8080", "[::1]:80", "127.9.9.9"])
async def test_this_machine_is_served(proxy: Proxy, host: str) -> None:
    assert statuses(await proxy.send(f"GET /v1/files HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())) == [200]


@pytest.mark.parametrize(
    "name", ["Host", "Authorization", "X-Api-Key", "X-Rollout-Id", "X-Task-Id", "X-Recording", "Idempotency-Key"]
)
async def test_a_header_that_decides_something_is_there_once(proxy: Proxy, name: str) -> None:
    values = {"Host": ("127.0.0.1", "localhost")}.get(name, ("on", "off"))
    twice = "".join(f"{name}: {value}\r\n" for value in values).encode()
    for start in (b"GET /v1/files HTTP/1.1\r\n", b"GET /rollouts HTTP/1.1\r\n"):
        (answer,) = await proxy.send(start + (b"" if name == "Host" else HOST) + twice + b"\r\n")
        assert statuses([answer]) == [400] and f"{name.lower()} is there 2 times".encode() in answer
    assert proxy.upstream.seen == []


@pytest.mark.parametrize("name", ["X-Rollout-Id", "X-Task-Id", "X-Agent-Name", "X-Rollout-Mode"])
@pytest.mark.parametrize("value", ["a%0d%0aX-Evil: 1", "a\x0bX-Evil: 1", "a X-Evil: 1", "\u00e9", "a" * 201])
async def test_no_header_gets_in_by_an_id(proxy: Proxy, name: str, value: str) -> None:
    data = POST.replace(b"embeddings", b"chat/completions") + f"{name}: {value}\r\n".encode("latin-1")
    (answer,) = await proxy.send(data + LENGTH + b"\r\n" + BODY)
    head = answer.partition(b"\r\n\r\n")[0]
    assert statuses([answer]) == [400] and b"x-evil" not in head.lower() and proxy.upstream.seen == []


async def test_an_id_in_the_url_cannot_hold_a_line_end_either(proxy: Proxy) -> None:
    for target in (b"/rollouts/a%0d%0aX-Evil:1/v1/files", b"/rollouts/a/tasks/b%0aX-Evil:1/v1/files"):
        (answer,) = await proxy.send(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        assert statuses([answer]) == [400] and b"\nx-evil" not in answer.lower()


async def test_headers_of_the_connection_end_here(proxy: Proxy) -> None:
    proxy.upstream.headers = {"Connection": "keep-alive, X-Private", "X-Private": "1", "X-Public": "1"}
    status, headers, _ = await proxy.post(
        "/v1/files",
        **{"Connection": "keep-alive, X-Secret, Authorization, X-Rollout-Id", "X-Secret": "1", "TE": "trailers"},
        **{"Proxy-Authorization": "Basic eDp5", "Keep-Alive": "timeout=5", "X-Forwarded-For": "1.2.3.4"},
        **{"X-Rollout-Id": "r1", "X-Recording": "on"},
    )
    assert (status, headers.get("x-private"), headers.get("x-public")) == (200, None, "1")
    (_, _, seen, _) = proxy.upstream.seen[0]
    gone = {"x-secret", "te", "proxy-authorization", "keep-alive", "x-rollout-id", "x-recording", "connection"}
    assert not gone & seen.keys()
    assert seen["authorization"] == f"Bearer {KEY}", "naming it cannot take our own away"
    assert seen["x-forwarded-for"] == "1.2.3.4", "what is no concern of ours is passed on, and decides nothing here"


# The upstream's key --------------------------------------------------------------------------------------------------


def pieces_of(text: str) -> list[bytes]:
    """One byte each, so that the key is split everywhere."""
    return [text[i : i + 1].encode() for i in range(len(text))]


ECHO = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}.", "headers": [f"Bearer {KEY}"] * 2}})
EVENTS = [
    {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": f"key {KEY}"}}]},
    {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": SECRET[:20]}}]},
    {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": SECRET[20:]}}]},
]
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/files", "/v1/models"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("status", [200, 401])
async def test_an_upstream_that_echoes_its_key_is_masked_everywhere(
    proxy: Proxy, caplog: pytest.LogCaptureFixture, path: str, split: bool, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.upstream.status = status
    proxy.upstream.headers = {"WWW-Authenticate": f"Bearer {KEY}", "X-Key": KEY, "Content-Length": str(len(ECHO))}
    proxy.upstream.pieces = pieces_of(ECHO) if split else [ECHO.encode()]
    got, headers, body = await proxy.post(path)
    assert (got, body) == (status, ECHO.replace(KEY, "*" * len(KEY)).encode())
    assert headers["x-key"] == "*" * len(KEY)
    assert proxy.upstream.seen[0][2]["authorization"] == f"Bearer {KEY}"
    await assert_key_is_nowhere(proxy, caplog, str(headers).encode() + body)


async def assert_key_is_nowhere(proxy: Proxy, caplog: pytest.LogCaptureFixture, answered: bytes) -> None:
    places = {"answer": answered, "store": proxy.stored()}
    places["log"] = "".join(
        f"{record.getMessage()} {record.exc_text} {record.args}" for record in caplog.records
    ).encode()
    for route in ("/metrics", "/rollouts", "/readyz", "/openapi.json", "/policy"):
        async with proxy.session.get(f"http://127.0.0.1:{proxy.port}{route}") as answer:
            places[route] = await answer.read()
    assert [name for name, data in places.items() if KEY.encode() in data] == []


@pytest.mark.parametrize("split", [False, True])
async def test_a_stream_is_masked_for_the_agent_and_redacted_for_the_record(
    proxy: Proxy, caplog: pytest.LogCaptureFixture, split: bool
) -> None:
    proxy.upstream.headers = {"Content-Type": "text/event-stream"}
    proxy.upstream.pieces = (
        [STREAM[i : i + 7].encode() for i in range(0, len(STREAM), 7)] if split else [STREAM.encode()]
    )
    _, headers, body = await proxy.post("/v1/chat/completions", {"model": "m", "stream": True, "messages": []})
    assert body == STREAM.replace(KEY, "*" * len(KEY)).encode(), "the agent has its own secret; only the key is masked"
    async with proxy.session.get(f"http://127.0.0.1:{proxy.port}/rollouts/{headers['x-rollout-id']}") as answer:
        (call,) = (await answer.json())["calls"]
    content = call["response"]["choices"][0]["message"]["content"]
    assert content == f"key {'*' * len(KEY)}[redacted]" and SECRET.encode() not in proxy.stored()
    await assert_key_is_nowhere(proxy, caplog, body)


async def test_a_keyed_upstream_is_not_asked_for_compressed_answers(proxy: Proxy) -> None:
    await proxy.post("/v1/files", **{"Accept-Encoding": "gzip"})
    assert proxy.upstream.seen[0][2]["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 200 OK\r\nBearer %s\r\n\r\n",
        b"Bearer %s\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: %s\n\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\ndata: {\"a\": \"%s",
    ],
)  # fmt: skip
async def test_our_errors_about_an_upstream_do_not_quote_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(garbage % KEY.encode())
        await writer.drain()
        writer.close()

    caplog.set_level(logging.DEBUG)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with serving(tmp_path, base_url) as port, aiohttp.ClientSession() as session:
        proxy = Proxy(port, Upstream(), tmp_path, session)
        answers = await proxy.send(POST.replace(b"embeddings", b"chat/completions") + LENGTH + b"\r\n" + BODY)
        assert answers, "the agent hears of it"
        await assert_key_is_nowhere(proxy, caplog, b"".join(answers))
    server.close()
    await server.wait_closed()


async def test_gzip_is_what_it_is_feared_for() -> None:
    """Why a keyed upstream is asked for plain bytes: compressed, the key could not be found."""
    assert KEY.encode() not in gzip.compress(ECHO.encode())
