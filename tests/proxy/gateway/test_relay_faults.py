"""The relay between an agent and things that go wrong: upstreams, the store, and agents that leave."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from lightning_proxy.proxy.apis import stream
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.errors import StoreUnavailable
from lightning_proxy.proxy.gateway.call import AT_ONCE_S
from lightning_proxy.proxy.types import CallEnd, CallStart
from lightning_proxy.proxy.upstreams.attempts import Upstreams
from lightning_proxy.proxy.upstreams.http import IDLE_CLOSED_S, make_session
from support.relaying import Handler, MemoryRecorder, OneUpstream, relay_of, relaying, speaking

CHAT = {"model": "policy", "messages": []}
STREAM = CHAT | {"stream": True}


class FullAtStart(MemoryRecorder):
    async def start(self, start: CallStart, also: Any = ()) -> None:
        raise StoreUnavailable("disk full")


class FullAtEnd(MemoryRecorder):
    async def end(self, end: CallEnd, also: Any = ()) -> None:
        raise StoreUnavailable("disk full")


class SlowAtEnd(MemoryRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def end(self, end: CallEnd, also: Any = ()) -> None:
        await self.go.wait()
        await super().end(end)


def event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"


def sending(*pieces: bytes) -> Handler:
    """An upstream that sends these bytes and closes the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(pieces))
        await writer.drain()

    return handle


class HangingUpstream:
    """Sends these bytes, then nothing; notices when it is left."""

    def __init__(self, *pieces: bytes) -> None:
        self.reached, self.left = asyncio.Event(), asyncio.Event()
        self._pieces = pieces

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(self._pieces))
        self.reached.set()
        while await reader.read(65536):
            pass
        self.left.set()


@asynccontextmanager
async def between(handler: Handler, recorder: Any = None, **upstream: Any) -> AsyncIterator[tuple[str, Any]]:
    recorder = recorder or MemoryRecorder()
    async with speaking(handler) as base, relaying(base, recorder, **upstream) as url:
        yield url, recorder


async def post(url: str, body: Any) -> tuple[int, bytes, bool]:
    """Status, body as far as it came, and whether the answer was complete."""
    got = b""
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as response:
        try:
            async for data in response.content.iter_any():
                got += data
        except aiohttp.ClientPayloadError:
            return response.status, got, False
        return response.status, got, True


@pytest.mark.parametrize("name", ["resets", "ends without DONE", "stalls"])
async def test_a_stream_that_breaks_is_seen_as_broken_and_recorded_as_error(name):
    handler = {
        "resets": sending(STREAM_HEAD, http_chunk(event("a"))),
        "ends without DONE": sending(STREAM_HEAD, http_chunk(event("a")), b"0\r\n\r\n"),
        "stalls": HangingUpstream(STREAM_HEAD, http_chunk(event("a"))),
    }[name]
    async with between(handler, idle_timeout_s=0.2) as (url, recorder):
        status, got, complete = await post(url, STREAM)
    assert (status, got, complete) == (200, event("a"), False)
    [end] = recorder.ends
    assert (end.status, end.trainable, end.http_status) == ("error", False, 200)
    assert end.response["choices"][0]["message"] == {"content": "a"}
    assert end.error


@pytest.mark.parametrize("last", [b"0\r\n\r\n", b""])
async def test_a_whole_answer_may_end_without_done_but_not_break_off(last):
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    finish = b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"
    handler = sending(STREAM_HEAD, http_chunk(event("a")), http_chunk(finish), last)
    async with between(handler, kind="openai") as (url, recorder):
        assert await post(url, STREAM) == (200, event("a") + finish, bool(last))
    assert recorder.ends[0].status == ("ok" if last else "error")
    assert recorder.ends[0].response["choices"][0]["message"] == {"content": "a"}


@pytest.mark.parametrize("garbage", [b"data: {garbage\n\n", b'data: {"error": {"message": "boom"}}\n\n'])
async def test_garbage_and_error_events_are_relayed_as_they_are_and_recorded_as_error(garbage):
    handler = sending(STREAM_HEAD, http_chunk(event("a") + garbage), http_chunk(DONE), b"0\r\n\r\n")
    async with between(handler, kind="openai") as (url, recorder):
        assert await post(url, STREAM) == (200, event("a") + garbage + DONE, True)
    assert recorder.ends[0].status == "error"


async def test_garbage_instead_of_json_passes_through_and_is_recorded_as_error():
    async with between(sending(JSON_HEAD, b"x" * 20)) as (url, recorder):
        assert await post(url, CHAT) == (200, b"x" * 20, True)
    assert (recorder.ends[0].status, recorder.ends[0].response) == ("error", "x" * 20)


@pytest.mark.parametrize(
    ("handler", "status"),
    [
        (sending(b""), 502),
        (sending(b"SSH-2.0-nonsense\r\n"), 502),
        (sending(JSON_HEAD, b"{"), 502),
        (sending(JSON_HEAD.replace(b"200 OK", b"999 What")), 502),
        (sending(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"), 502),
        (HangingUpstream(), 504),
    ],
)
async def test_an_upstream_that_fails_before_the_answer_is_502_or_504(handler, status):
    async with between(handler, first_byte_timeout_s=0.2, idle_timeout_s=0.2) as (url, recorder):
        got, body, _ = await post(url, CHAT)
    assert (got, orjson.loads(body)["error"]["type"]) == (status, "upstream_error")
    assert (recorder.ends[0].status, recorder.ends[0].http_status) == ("error", status)


async def test_an_answer_that_stalls_when_the_agent_has_a_part_of_it_is_broken_off():
    async with between(HangingUpstream(JSON_HEAD, b"{1"), kind="openai", idle_timeout_s=0.5) as (url, recorder):
        assert await post(url, CHAT) == (200, b"{", False)
    assert (recorder.ends[0].status, recorder.ends[0].response) == ("error", None)


@pytest.mark.parametrize("length", [b"Content-Length: 21", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_an_answer_that_is_no_stream_passes_as_it_comes_and_its_last_bytes_wait_for_the_record(length, kind):
    seen = asyncio.Event()

    async def handle(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%b\r\n\r\n" % length)
        for piece in (b"  ", b'{"choices": []', b"} ", b"  \n"):
            await asyncio.sleep(AT_ONCE_S)
            writer.write(http_chunk(piece) if b"chunked" in length else piece)
            if piece == b"  ":
                await asyncio.wait_for(seen.wait(), 10)
        writer.write(b"0\r\n\r\n" if b"chunked" in length else b"")

    recorder = SlowAtEnd()
    async with (
        between(handle, recorder, kind=kind) as (url, _),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=CHAT) as response,
    ):
        got = await response.content.readexactly(2)
        seen.set()
        if kind == "openai":
            got += await response.content.readexactly(14)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readexactly(1), 0.3)
        recorder.go.set()
        assert orjson.loads(got + await response.content.read()) == {"choices": []}
    assert recorder.ends[0].response == {"choices": []}


async def test_an_upstream_that_takes_no_connection_is_504_in_time():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(3):  # more than fit into its queue
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        base, recorder = f"http://127.0.0.1:{full.getsockname()[1]}", MemoryRecorder()
        async with relaying(base, recorder, connect_timeout_s=0.2) as url:
            status, body, _ = await post(url, CHAT)
    assert (status, orjson.loads(body)["error"]["message"]) == (504, "upstream up: no connection within 0.2 s")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_an_upstream_that_takes_no_more_of_a_request_is_504_in_time():
    large = CHAT | {"messages": [{"role": "user", "content": "x" * 16_000_000}]}
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        base, recorder = f"http://127.0.0.1:{deaf.getsockname()[1]}", MemoryRecorder()
        async with relaying(base, recorder, max_body_mb=20, first_byte_timeout_s=0.3) as url:
            status, body, _ = await post(url, large)
    assert (status, orjson.loads(body)["error"]["message"]) == (504, "upstream up: no answer within 0.3 s")


async def test_an_upstream_that_is_down_is_502():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        recorder = MemoryRecorder()
        async with relaying(f"http://127.0.0.1:{unused.getsockname()[1]}", recorder) as url:
            status, body, _ = await post(url, CHAT)
    assert status == 502
    assert b"cannot be reached" in body
    assert recorder.ends[0].http_status == 502


BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nRetry-After: %s\r\n\r\nbusy"


@pytest.mark.parametrize(("retries", "expected"), [(0, 503), (1, 503), (2, 200)])
@pytest.mark.parametrize("wait", [b"0", b"Wed, 21 Oct 2015 07:28:00 GMT"])
async def test_an_upstream_that_is_busy_is_asked_again_if_so_configured(retries, expected, wait):
    answers = [BUSY % wait, BUSY % wait, JSON_HEAD + b'{"choices": []}     ']
    served = []

    async def handle(reader, writer):
        served.append(1)
        writer.write(answers[len(served) - 1])
        await writer.drain()

    async with between(handle, retries=retries) as (url, recorder):
        status, _, complete = await post(url, CHAT)
    assert (status, complete, len(served)) == (expected, True, min(retries, 2) + 1)
    assert len(recorder.starts) == len(recorder.ends) == 1


class ClosesWhenIdle:
    """Answers the first request of each connection, and closes it, after a while, when the next one comes."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.asked, self._wait_s = 0, wait_s

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(JSON_HEAD + b'{"choices": []}     ')  # the first request was read
        self.asked += 1
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        await asyncio.sleep(self._wait_s)


async def test_a_request_that_meets_a_closed_idle_connection_is_sent_over_a_new_one():
    upstream = ClosesWhenIdle()
    async with between(upstream) as (url, recorder):
        assert [(await post(url, CHAT))[0] for _ in range(4)] == [200] * 4
        many = await asyncio.gather(*(post(url, CHAT) for _ in range(8)))
        assert [status for status, _, _ in [*many, *await asyncio.gather(*(post(url, CHAT) for _ in range(8)))]] == [
            200
        ] * 16
    assert [end.status for end in recorder.ends] == ["ok"] * 20


async def test_a_request_that_a_server_worked_on_before_it_ended_is_not_sent_again():
    upstream = ClosesWhenIdle(wait_s=IDLE_CLOSED_S * 1.5)
    async with between(upstream) as (url, _):
        assert [(await post(url, CHAT))[0] for _ in range(2)] == [200, 502]
    assert upstream.asked == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
        b"HTTP/1.1 200",
    ],
)
async def test_an_error_does_not_show_where_the_upstream_is(answer):
    async with between(sending(answer)) as (url, recorder):
        status, body, _ = await post(url, CHAT)
    assert status == 502
    assert b"127.0.0.1" not in body and "127.0.0.1" not in recorder.ends[0].error


async def test_an_upstream_that_asks_for_more_patience_than_there_is_is_not_asked_again():
    served = []

    async def handle(reader, writer):
        served.append(1)
        await sending(BUSY % b"2")(reader, writer)

    async with between(handle, retries=3, retry_wait_s=1) as (url, recorder):
        assert await post(url, CHAT) == (503, b"busy", True)
    assert (len(served), recorder.ends[0].http_status) == (1, 503)


async def test_an_upstream_that_comes_back_is_reached_if_so_configured():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
    recorder = MemoryRecorder()
    async with relaying(f"http://127.0.0.1:{address[1]}", recorder, retries=8, retry_wait_s=0.2) as url:
        call = asyncio.create_task(post(url, CHAT))
        await asyncio.sleep(0.3)
        assert not call.done()

        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(JSON_HEAD + b'{"choices": []}     ')
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(handle, *address):
            assert (await call)[0] == 200
    assert [end.status for end in recorder.ends] == ["ok"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_that_takes_too_long_is_broken_off(streamed):
    async def drip(reader, writer):
        writer.write(STREAM_HEAD if streamed else JSON_HEAD)
        for _ in range(100):
            writer.write(http_chunk(event("a")) if streamed else b"x" * 0)
            await writer.drain()
            await asyncio.sleep(0.05)

    async with between(drip, total_timeout_s=0.3) as (url, recorder):
        status, _, complete = await post(url, STREAM if streamed else CHAT)
    assert (status, complete) == (200, False)
    assert (recorder.ends[0].status, "no complete answer within 0.3 s" in recorder.ends[0].error) == ("error", True)


async def test_a_call_that_cannot_be_stored_is_503_and_leaves_the_upstream():
    upstream = HangingUpstream()
    async with between(upstream, FullAtStart()) as (url, recorder):
        status, body, _ = await post(url, CHAT)
        assert (status, orjson.loads(body)["error"]["message"]) == (503, "disk full")
        if upstream.reached.is_set():
            await upstream.left.wait()
    assert recorder.ends == []


async def test_an_answer_that_cannot_be_stored_is_not_given_out():
    async with between(sending(JSON_HEAD, b'{"choices":[],"a":1}'), FullAtEnd()) as (url, _):
        assert (await post(url, CHAT))[0] == 503
    async with between(sending(STREAM_HEAD, http_chunk(event("a") + DONE), b"0\r\n\r\n"), FullAtEnd()) as (url, _):
        assert await post(url, STREAM) == (200, event("a"), False)


async def test_the_terminal_event_waits_for_the_record():
    recorder = SlowAtEnd()
    handler = sending(STREAM_HEAD, http_chunk(event("a")), http_chunk(DONE), b"0\r\n\r\n")
    async with (
        between(handler, recorder, kind="openai") as (url, _),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=STREAM) as response,
    ):
        assert await response.content.readany() == event("a")
        rest = asyncio.create_task(response.content.read())
        await asyncio.wait((rest,), timeout=0.1)
        assert not rest.done()
        assert recorder.ends == []
        recorder.go.set()
        assert await rest == DONE


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_an_agent_that_leaves_stops_the_upstream_call_and_is_recorded(body):
    upstream = HangingUpstream(*([STREAM_HEAD, http_chunk(event("a"))] if body is STREAM else []))
    async with between(upstream) as (url, recorder), aiohttp.ClientSession() as http:
        call = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body))
        await upstream.reached.wait()
        if body is STREAM:
            response = await call
            assert await response.content.readany() == event("a")
            response.close()
        else:
            call.cancel()
        await upstream.left.wait()
        await recorder.ended.wait()
    assert (recorder.ends[0].status, recorder.ends[0].trainable) == ("cancelled", False)
    if body is STREAM:
        assert recorder.ends[0].response["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_the_upstream_may_finish_for_the_record_when_the_agent_leaves(kind):
    goes_on = asyncio.Event()

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + http_chunk(event("a")))
        await goes_on.wait()
        writer.write(http_chunk(event("b") + DONE) + b"0\r\n\r\n")

    async with between(upstream, kind=kind, on_disconnect="finish") as (url, recorder), aiohttp.ClientSession() as http:
        async with http.post(f"{url}/v1/chat/completions", json=STREAM) as response:
            assert await response.content.readany()
            response.close()
        await asyncio.sleep(0.2)  # the proxy notices
        assert recorder.ends == []
        goes_on.set()
        await recorder.ended.wait()
    [end] = recorder.ends
    assert end.response["choices"][0]["message"]["content"] == "ab"
    assert (end.status, end.trainable, "finished for the record" in end.error) == ("cancelled", False, True)


async def test_an_upstream_that_does_not_finish_in_time_is_stopped_when_the_agent_has_left():
    upstream = HangingUpstream(STREAM_HEAD, http_chunk(event("a")))
    finish = {"on_disconnect": "finish", "finish_timeout_s": 0.2}
    async with between(upstream, **finish) as (url, recorder), aiohttp.ClientSession() as http:
        async with http.post(f"{url}/v1/chat/completions", json=STREAM) as response:
            assert await response.content.readany() == event("a")
            response.close()
        await upstream.left.wait()
        await recorder.ended.wait()
    [end] = recorder.ends
    assert end.response["choices"][0]["message"]["content"] == "a"
    assert (end.status, "not finished within 0.2 s" in end.error) == ("cancelled", True)


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_what_the_upstream_refuses_is_asked_again_without_our_additions(body):
    asked = []

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(orjson.loads(await reader.read(65536)))
        if "return_token_ids" in asked[-1]:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 8\r\n\r\nno such!")
        else:
            writer.write(JSON_HEAD + b'{"choices":[],"a":1}')

    async with between(upstream) as (url, recorder):
        assert await post(url, body) == (200, b'{"choices":[],"a":1}', True)
    assert asked[-1] == body | {"model": "base"}
    assert (recorder.ends[0].status, len(asked)) == ("ok", 2)


async def test_a_refusal_that_our_additions_are_no_reason_for_is_passed_on_at_once():
    asked = []
    too_long = b'{"error":{"message":"the maximum context length is 8"}}'

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(orjson.loads(await reader.read(65536)))
        if len(asked) == 1:
            writer.write(JSON_HEAD + b'{"choices":[],"a":1}')
        else:
            head = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(too_long) + too_long)

    async with between(upstream) as (url, recorder):
        assert (await post(url, CHAT))[0] == 200
        assert (await post(url, CHAT))[:2] == (400, too_long)
    assert len(asked) == 2, "what it took before, and does not name, it does not refuse"
    assert [end.status for end in recorder.ends] == ["ok", "error"]


async def test_a_call_that_is_stopped_with_the_server_is_recorded():
    upstream, recorder, messages = (
        HangingUpstream(STREAM_HEAD, http_chunk(event("a"))),
        MemoryRecorder(),
        asyncio.Queue(),
    )
    messages.put_nowait({"type": "http.request", "body": orjson.dumps(STREAM)})
    sent = asyncio.Queue()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
    async with speaking(upstream) as base, make_session() as session:
        target = OneUpstream(UpstreamConfig(name="up", base_url=f"{base}/v1", kind="openai"))
        relay = relay_of(Config(), Upstreams(session), recorder, target)
        call = asyncio.create_task(relay(scope, messages.get, sent.put))
        while (await sent.get()).get("body") != event("a"):
            pass
        call.cancel()
        await asyncio.wait((call,))
        await upstream.left.wait()
    assert call.cancelled()
    assert recorder.ends[0].status == "cancelled"
    assert recorder.ends[0].response["choices"][0]["message"]["content"] == "a"


@pytest.fixture
def kept_up_to_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_ANSWER_BYTES", 2**20)


def unkept(recorder: MemoryRecorder) -> bool:
    """Whether the only record says that the answer was too large."""
    [end] = recorder.ends
    assert (end.status, end.trainable, end.response, end.choices) == ("ok", False, None, ())
    return "larger than 64 MB" in end.untrainable_reason


@pytest.mark.parametrize("kind", ["vllm", "openai"])
@pytest.mark.usefixtures("kept_up_to_a_megabyte")
async def test_a_large_answer_reaches_the_agent_whole_and_is_not_kept(kind):
    injected = {"token_ids": [1], "logprobs": {"content": []}} if kind == "vllm" else {}
    answer = {"choices": [{"index": 0, "message": {"content": "x" * 2**21}, **injected}], "usage": {}}
    body = orjson.dumps(answer)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with between(sending(head, body), kind=kind) as (url, recorder):
        status, got, complete = await post(url, CHAT)
    assert (status, complete) == (200, True)
    seen = orjson.loads(got)["choices"][0]
    assert (seen["message"]["content"], seen.get("token_ids"), seen.get("logprobs")) == ("x" * 2**21, None, None)
    assert unkept(recorder)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
@pytest.mark.usefixtures("kept_up_to_a_megabyte")
async def test_a_long_stream_reaches_the_agent_whole_and_is_not_kept(kind):
    events = [event("x" * 2**18) for _ in range(8)]
    handler = sending(STREAM_HEAD, *map(http_chunk, events), http_chunk(DONE), b"0\r\n\r\n")
    async with between(handler, kind=kind) as (url, recorder):
        assert await post(url, STREAM) == (200, b"".join(events) + DONE, True)
    assert unkept(recorder)


@pytest.mark.parametrize("last", [DONE, b""])
@pytest.mark.parametrize("kind", ["vllm", "openai"])
@pytest.mark.usefixtures("kept_up_to_a_megabyte")
async def test_a_large_event_reaches_the_agent_whole_and_what_follows_it_too(kind, last):
    large, after = event("x" * 2**21), event("y")
    pieces = [large[i : i + 50_000] for i in range(0, len(large), 50_000)]
    end = http_chunk(last) if last else b""
    handler = sending(STREAM_HEAD, *map(http_chunk, pieces), http_chunk(after), end, b"0\r\n\r\n")
    async with between(handler, kind=kind) as (url, recorder):
        status, got, complete = await post(url, STREAM)
    assert (status, got) == (200, large + after + last)
    assert complete == (bool(last) or kind == "openai")  # where it was let go, nobody knows whether it was the last
    assert not complete or unkept(recorder)


@pytest.mark.usefixtures("kept_up_to_a_megabyte")
async def test_an_event_without_end_is_not_kept_in_memory_for_ever(monkeypatch):
    monkeypatch.setattr(stream, "MAX_HELD_BYTES", 2**21)
    handler = sending(STREAM_HEAD, http_chunk(event("a") + b"data: "), *[http_chunk(b"x" * 2**20)] * 3)
    async with between(handler) as (url, recorder):
        status, got, complete = await post(url, STREAM)
    assert (status, got, complete) == (200, event("a"), False)
    assert "without the end of an event" in recorder.ends[0].error


async def test_a_stream_may_end_with_an_error():
    failure = b'data: {"error": {"message": "boom"}}\n\n'
    async with between(sending(STREAM_HEAD, http_chunk(event("a") + failure), b"0\r\n\r\n")) as (url, recorder):
        assert await post(url, STREAM) == (200, event("a") + failure, True)
    assert (recorder.ends[0].status, "boom" in recorder.ends[0].error) == ("error", True)
