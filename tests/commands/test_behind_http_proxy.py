"""Where the environment names an HTTP proxy, what goes to our proxy does not pass it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.raw import Upstream
from contract.system import in_this_process, played
from lightning_proxy import client
from lightning_proxy.client.program import reached_directly

VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
ASKED: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    """The HTTP proxy that the environment names. It answers by itself, and keeps what reached it."""
    http_proxy = Upstream()
    with played(http_proxy) as url:
        for name in VARIABLES:
            monkeypatch.setenv(name, url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield http_proxy


def test_the_list_of_hosts_without_http_proxy_grows_by_ours() -> None:
    for url, there, upper, lower in (
        ("http://proxy.example", {"no_proxy": "a, b"}, "a,b,proxy.example", "a,b,proxy.example"),
        ("http://a", {"NO_PROXY": "a,b", "no_proxy": "c"}, "a,b", "c,a"),
        ("http://a", {"NO_PROXY": "*"}, "*", "*"),
        ("http://[::1]:8080", {}, "::1,[::1]", "::1,[::1]"),
    ):
        env = reached_directly({"LIGHTNING_URL": url}, there)
        assert (env["NO_PROXY"], env["no_proxy"]) == (upper, lower)


def test_the_client_asks_the_proxy_directly(tmp_path: Path, between: Upstream) -> None:
    with in_this_process(tmp_path) as proxy:
        with client.rollout("r1", url=proxy.url) as run, run.openai() as llm:
            llm.chat.completions.create(**ASKED)
            client.emit_reward(0.5, final=False)

        async def agent() -> None:
            async with client.rollout("r2", url=proxy.url) as run, run.async_openai() as llm:
                await llm.chat.completions.create(**ASKED)

        asyncio.run(agent())
        assert (between.seen, run.environ["NO_PROXY"]) == ([], "127.0.0.1")
        assert [len(proxy.rollout(name)["calls"]) for name in ("r1", "r2")] == [1, 1]


@pytest.mark.parametrize("trusts", [True, False])
def test_an_upstream_is_asked_through_the_http_proxy_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, between: Upstream, trusts: bool
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", os.environ["http_proxy"].replace("//", "//user:p%40ss@"))
    theirs = Upstream()
    with played(theirs) as url:
        asked = {"name": "m", "kind": "openai", "base_url": f"{url}/v1", "models": ["m"], "api_key": "sk-1"}
        upstreams = [{"name": "policy", "kind": "vllm"}, asked | {"trust_env": trusts}]
        with in_this_process(tmp_path, upstreams=upstreams) as proxy:
            assert proxy.post("/v1/chat/completions", ASKED | {"model": "m"}).status == 200
    (one,) = (between if trusts else theirs).seen
    assert len(between.seen + theirs.seen) == 1
    assert one.target == f"{url * trusts}/v1/chat/completions"
    assert one.headers["authorization"] == "Bearer sk-1"
    assert one.headers.get("proxy-authorization") == ("Basic dXNlcjpwQHNz" if trusts else None)
