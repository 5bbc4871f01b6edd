"""Bodies that are malformed, too large, packed, slow or many: refused by name, or read like any other."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from contract.raw import HOST, connect, raw_deflate, send, statuses, zstd
from contract.system import Json, Proxy, in_this_process
from support.paths import has

CHAT: Json = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
MB = 1_000_000


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with in_this_process(tmp_path_factory.mktemp("small"), proxy={"max_body_mb": 1, "max_bodies_mb": 1}) as one:
        yield one


PADDING = b'"padding": "%s", ' % (b"x" * 200_000)  # of a size that is read in turns with others
BAD = [b"{", b"[5]", b"", b"1, 2", b'{%b"a": NaN}', b'{%b"a": "\xff"}', b'{%b"a": ' + b"[" * 3000 + b"]" * 3000 + b"}"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/reward"])
def test_what_is_no_json_object_is_refused_in_openais_shape(proxy: Proxy, path: str) -> None:
    before = proxy.get("/rollouts")["data"]
    for body in {bad.replace(b"%b", padding) for bad in BAD for padding in (b"", PADDING)}:
        answer = proxy.post(path, body)
        assert answer.status in ((400,) if path.startswith("/v1") else (400, 422)), body[:40]
        assert answer.error["message"]
    assert proxy.get("/rollouts")["data"] == before


def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not(proxy: Proxy) -> None:
    large = b'{"model": "policy", "pad": "%s"}' % (b"x" * MB)
    assert proxy.post("/v1/chat/completions", large).status == 413
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (large[:MB], large[MB:])) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST
    assert statuses(send(proxy.url, head + b"Transfer-Encoding: chunked\r\n\r\n", chunks)) == [413]
    assert statuses(send(proxy.url, head + b"Content-Length: 1000001\r\n\r\n")) == [413], "before it comes"


SAID = json.dumps(CHAT | {"user": "é" * 1000}).encode()
SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00note"  # a frame that decoders leave out: RFC 8878, section 3.1.2


def without_a_size(data: bytes, window: int = 20) -> bytes:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window})
    return bytes(packer.compress(data) + packer.flush())


PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd.compress, "gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress,
}  # fmt: skip
PACKED = [
    *((name, pack(SAID), 200) for name, pack in PACK.items()),
    ("deflate", raw_deflate(SAID), 200),
    ("identity", SAID, 200),
    ("utf-8", SAID, 200),  # servers do not look at it
    ("ZSTD", without_a_size(SAID), 200),
    ("zstd", zstd.compress(SAID[:9]) + SKIPPED + zstd.compress(SAID[9:]), 200),
    ("gzip", gzip.compress(SAID[:9]) + gzip.compress(SAID[9:]), 200),
    ("gzip, zstd", zstd.compress(gzip.compress(SAID)), 200),
    ("deflate,identity , gzip,", gzip.compress(raw_deflate(SAID)), 200),
    *((name, b"x", 415) for name in ("br", "gzip, br", "compress", "gzip;q=1", ", ".join(["gzip"] * 5))),
    *((name, data, 400) for name, pack in PACK.items()
      for data in (b"not packed at all", pack(SAID)[:-3], pack(SAID) + b"more", b"")),
    *((name, pack(b" " * (MB + 1)), 413) for name, pack in PACK.items()),
    ("deflate", raw_deflate(b" " * (MB + 1)), 413),
    ("zstd", zstd.compress(b" " * (MB // 2 + 1)) * 2, 413),
    ("gzip, zstd", zstd.compress(gzip.compress(b" " * (MB + 1))), 413),
    ("zstd, gzip", gzip.compress(b"".join(zstd.compress(SAID[i : i + 9]) for i in range(0, len(SAID), 9))), 400),
    ("zstd", SKIPPED * 10_000 + zstd.compress(SAID), 400),
    ("zstd", without_a_size(SAID, window=27), 400),
]  # fmt: skip


def test_a_packed_body_is_unpacked_within_bounds_or_refused(proxy: Proxy) -> None:
    assert proxy.vllm is not None
    for n, (encoding, body, status) in enumerate(PACKED):
        answer = proxy.post(f"/rollouts/packed-{n}/v1/chat/completions", body, Content_Encoding=encoding)
        assert answer.status == status, (n, encoding, body[:40])
        if status == 200:
            assert proxy.rollout(f"packed-{n}")["calls"][0]["request"] == json.loads(SAID)
            assert body == SAID or "Content-Encoding" not in proxy.vllm.requests[-1]["headers"]
        else:
            assert answer.error["message"] and proxy.call("GET", f"/rollouts/packed-{n}").status == 404
    twice = zstd.compress(gzip.compress(SAID))  # two headers are read as one
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Content-Encoding: gzip\r\nContent-Encoding: zstd\r\n"
    assert statuses(send(proxy.url, head + b"Content-Length: %d\r\n\r\n%s" % (len(twice), twice))) == [200]


CONTROL = ("/reward", "/rollouts", "/rollouts/r1/events", "/rollouts/r1/end", "/policy/promote")
PATHS = ("/v1/chat/completions", *(["/otlp/v1/traces"] if has("otel") else []), *CONTROL)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    keys = {"api_keys": ["agent"], "admin_keys": ["admin"], "max_body_mb": 1, "body_timeout_s": 1}
    with in_this_process(tmp_path_factory.mktemp("keyed"), proxy=keys) as one:
        yield one


def begun(path: str, length: int, body: bytes = b"", key: str = "agent", method: str = "POST", more: str = "") -> bytes:
    """A request that declares more than it sends."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n{more}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode() + body


def test_the_key_is_judged_before_the_body_has_come(keyed: Proxy) -> None:
    for path in PATHS:
        (answer,) = send(keyed.url, begun(path, 30 * MB, key="nobody"))
        assert (statuses([answer]) == [401] and b"invalid_api_key" in answer) or path.startswith("/otlp"), path
        for body in (b"{", b"{}", b"x" * 2 * MB):
            assert keyed.post(path, body, "nobody").status == 401, path
    promote = "/policy/promote"
    assert keyed.post(promote, b"{", "agent").status == 401 and keyed.post(promote, b"{}", "admin").status == 422


def test_a_body_that_does_not_come_is_given_up(keyed: Proxy) -> None:
    requests = [begun(path, 900_000, body) for path in PATHS[:3] for body in (b"", b"{" * 100_000)]
    with ThreadPoolExecutor(len(requests)) as pool:
        for (answer,) in pool.map(lambda request: send(keyed.url, request), requests):
            assert statuses([answer]) == [408] and b"connection: close" in answer.lower()
            assert b"body_timeout_s" in answer


def test_while_large_bodies_come_others_wait_and_small_ones_do_not(proxy: Proxy) -> None:
    assert proxy.chat("r1").status == 200
    reward = json.dumps({"rollout_id": "r1", "reward": 1, "comment": "x" * 9_000}).encode()
    with connect(proxy.url) as slow:
        slow.sendall(begun("/reward", 900_000, b"[" + b" " * 400_000))
        time.sleep(0.5)
        assert proxy.post("/reward", reward).status == 200
        (refused,) = send(proxy.url, begun("/rollouts", 900_000, b" " * 600_000))
        assert statuses([refused]) == [503] and b"retry-after: 1\r\n" in refused
        slow.sendall(b" " * (900_000 - 400_002 - len(reward)) + reward + b"]")
        assert statuses([slow.recv(2**16)]) == [200]
    many = json.dumps([json.loads(reward)] * 100).encode()  # 0.9 MB: all there is, again
    assert [proxy.post("/reward", many).status for _ in range(2)] == [200, 200]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    redact = {"secrets": True, "patterns": ["no secret"]}
    with in_this_process(tmp_path_factory.mktemp("roomy"), recording={"redact": redact}) as one:
        yield one


@contextmanager
def nobody_held_up(proxy: Proxy) -> Iterator[None]:
    """Others are answered meanwhile: seconds only where the work for this one is done in their way."""
    ended, longest = threading.Event(), 0.0

    def others() -> None:
        nonlocal longest
        while not ended.wait(0.02):
            began = time.monotonic()
            assert proxy.call("GET", "/healthz").status == 200
            longest = max(longest, time.monotonic() - began)

    other = threading.Thread(target=others)
    other.start()
    try:
        yield
    finally:
        ended.set()
        other.join()
    assert longest < 5


FENCE = "```json" + " " * 3000 + "x"  # a pattern that went back and forth took minutes
ORDERS = json.dumps({"a": [f"order number {i:06} is here" for i in range(8_000)]})


def called(arguments: str) -> Json:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "call_abcdefghij", "type": "function", "function": function}]}


def test_no_text_of_a_call_holds_others_up(roomy: Proxy) -> None:
    assert roomy.vllm is not None
    before = roomy.vllm.answer
    slow: list[tuple[str, Json]] = [
        ("go", {"role": "assistant", "content": FENCE}),
        ("and go", called(FENCE)),
        ("sk-" * 60_000, {"role": "assistant", "content": "sk-" * 200_000}),
        ("word " * 120_000, called(ORDERS)),
    ]
    try:
        for said, message in slow:
            roomy.vllm.answer = lambda _, message=message: message
            messages, rollouts = [{"role": "user", "content": said}], set()
            for more in ([], [message, {"role": "user", "content": "and?"}]):
                packed = gzip.compress(json.dumps(CHAT | {"messages": messages + more}).encode(), 1)
                with nobody_held_up(roomy):
                    answer = roomy.post("/v1/chat/completions", packed, Content_Encoding="gzip")
                assert answer.status == 200
                given = answer.json["choices"][0]["message"]
                assert all(given[field] == value for field, value in message.items())
                rollouts.add(answer.headers["x-rollout-id"])
            assert len(rollouts) == 1, "it is one conversation"
    finally:
        roomy.vllm.answer = before


def test_a_large_conversation_is_recorded_and_gone_on_with(roomy: Proxy) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} is no secret"} for i in range(10_001)]
    sent, rollouts = [], set()
    for turn in range(3):
        sent.append(messages)
        answer = roomy.chat(None, *messages, user=f"u{turn}")
        assert answer.status == 200
        rollouts.add(answer.headers["x-rollout-id"])
        messages = [*messages, answer.json["choices"][0]["message"], {"role": "user", "content": f"more {turn}"}]
    (rollout,) = rollouts
    kept = json.loads(json.dumps(sent).replace("no secret", "[redacted]"))
    assert [call["request"]["messages"] for call in roomy.rollout(rollout)["calls"]] == kept
    told = roomy.get(f"/rollouts/{rollout}/transitions?requests=whole")["data"]
    assert [one["state"]["messages"] for one in told] == kept
