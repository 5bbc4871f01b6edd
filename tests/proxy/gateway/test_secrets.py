"""Secrets: a key in an upstream's address or answer is shown nowhere, and what is a secret in a text."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.commands.doctor.doctor import Report, check_servers
from lightning_proxy.core.config.address import secrets_in, shown, without_secrets
from lightning_proxy.core.config.section import check_url
from lightning_proxy.core.config.server import RedactConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.core.errors import LightningError
from lightning_proxy.core.redact import MASK, Redactor
from lightning_proxy.proxy.gateway.upstream import KeyMask
from lightning_proxy.serving.vllm import VllmServer, operator_session
from lightning_proxy.store.keys import new_key
from support.fuzzing import cut

KEY = "k3y-in-the-address-5f0d9a"
PASSWORD = "pa55word-in-the-address"
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
# What servers answer, and the status that the agent gets.
ANSWERS = [
    (b"HTTP/1.1 nonsense\r\n\r\n", 502),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 502),
    (b"", 502),
    (b"HTTP/1.1 307 Moved\r\nLocation: /other?key=%s\r\nContent-Length: 0\r\n\r\n" % KEY.encode(), 307),
    (b"HTTP/1.1 404 Not Found\r\nContent-Length: 61\r\n\r\nno route ?key=%s" % KEY.encode().ljust(47), 404),
]


async def test_a_key_in_an_address_is_in_no_answer_record_or_log(
    running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, answers = list[bytes](), list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[-1])
        writer.close()

    caplog.set_level(logging.DEBUG, "lightning_proxy")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://user:{PASSWORD}@127.0.0.1:{port}/v1?api-version=2024-02-01&key={KEY}"
        other = UpstreamConfig(name="other", kind="openai", base_url=url, models=["m"])
        async with running(tmp_path, others=[other]) as system:
            said = ""
            for raw, wanted in ANSWERS:
                answers.append(raw)
                for stream in (False, True):
                    body = json.dumps(CALL | {"stream": stream}).encode()
                    to = f"{system.url}/rollouts/r/v1/chat/completions"
                    async with system.session.post(to, data=body, allow_redirects=False) as got:
                        said += str(got.headers) + await got.text()
                        assert got.status == wanted, said
                report = Report(as_json=True)
                await check_servers(system.config, system.session, other, report)
                said += str(report.checks)
            for path in ("/rollouts/r", "/readyz"):
                said += json.dumps(await system.call("GET", path))
    assert f"key={KEY}".encode() in asked[0] and b"Basic " in asked[0], "it is sent"
    store = b"".join(file.read_bytes() for file in tmp_path.glob("store.db*"))
    for secret in (KEY, PASSWORD):
        assert secret not in said + caplog.text and secret.encode() not in store


async def test_addresses_are_shown_without_what_is_secret() -> None:
    async with operator_session() as session:
        server = VllmServer(session, f"http://user:{PASSWORD}@127.0.0.1:9/v1", {})
        with pytest.raises(LightningError, match="vLLM at http://127.0.0.1:9 is not reachable") as away:
            await server.models()
    assert PASSWORD not in str(away.value)
    for url, seen in (
        ("http://u:p@host:1/v1?key=x#y", "http://host:1/v1"),
        ("https://host/v1", "https://host/v1"),
        ("host/v1?key=x", "host/v1"),
        ("postgresql://u:p@h/db", "postgresql://h/db"),
        ("http://u:p@[::1]:80?x=@/", "http://[::1]:80"),
        ("https://u:p@h/v1?key=x&to=https://other/", "https://h/v1"),
        ("http://u:p/w@h/v1", "http://…"),
        ("http://u:p?w@h/v1", "http://…"),
        ("//u:p@h/v1", "//h/v1"),
    ):
        assert shown(url) == seen
    said = "400, message='bad', url='http://u:p@h/v1?key=x' and URL(\"https://t@h?k\")"
    assert without_secrets("http://u:p@h:80: refused") == "http://h:80: refused"
    with pytest.raises(ValueError, match="must be an http") as refused:
        check_url("base_url", f"http://u:{PASSWORD}/x@h/v1", is_vllm=False)
    assert PASSWORD not in str(refused.value)
    assert without_secrets(said) == "400, message='bad', url='http://h/v1' and URL(\"https://h\")"
    assert {*secrets_in("https://us%20er:pw@h/v1?key=a%2Fb&v=1&x-token=c&code=d&pwd=e&encode=f")} == {
        "us%20er", "us er", "pw", "a/b", "a%2Fb", "c", "d", "e",
    }  # fmt: skip
    assert [*secrets_in("http://[h")] == []


KEYS = st.text("ab-", min_size=12, max_size=16)  # few letters: the key begins again within itself


@given(KEYS, st.lists(st.text("ab-x", max_size=6)), st.lists(st.integers(0, 60), max_size=30))
def test_however_it_is_split_the_key_is_masked_and_nothing_else(key: str, texts: list[str], cuts: list[int]) -> None:
    data, mask = key.join(texts).encode(), KeyMask(key)
    out = b"".join(map(mask.feed, cut(data, cuts))) + mask.end()
    assert len(out) == len(data)
    assert key.encode() not in out
    assert all(masked in (byte, ord("*")) for masked, byte in zip(out, data, strict=True))
    assert (out == data) == (key.encode() not in data)


@given(KEYS, st.binary(max_size=50))
def test_only_what_may_be_the_keys_beginning_is_held_back(key: str, data: bytes) -> None:
    event = b"data: " + data.replace(b"\n", b"") + b"\n\n"
    assert KeyMask(key).feed(event) == event.replace(key.encode(), b"*" * len(key)), "no event ever waits"


def test_secrets_are_found_behind_an_escape_and_our_own_keys_are_secrets() -> None:
    redactor = Redactor(RedactConfig(secrets=True), ["a configured key", "short"])
    for text in ("a\\nsk-", 'x="sk-', "?key=%20sk-", "\\u000ask-", "key:sk-", "(sk-"):
        masked = redactor.text(text + "proj-Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6")
        assert masked == redactor.text(masked) == text[:-3] + MASK
    for key in (*map(new_key, ("agent", "admin", "rollout")), "a configured key", f"lpk-whatever-{'x1' * 20}"):
        assert redactor.text(f"key={key}.") == f"key={MASK}."
    assert redactor.text("in short") == "in short"
    deep: Any = "zzz"
    for _ in range(5000):
        deep = [deep]
    assert Redactor(RedactConfig(patterns=["zzz"])).value(deep, "response") == MASK, "too deep: not stored at all"
