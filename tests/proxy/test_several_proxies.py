"""Two proxies over one PostgreSQL: what one of them writes, the other one knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from contract.system import Json, Proxy, configuration, in_this_process, wait_until
from contract.vllm import PlayedVllm
from lightning_proxy.core.config.file import load_config
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.served import earlier_version
from support.stores import postgres_server

OWN, BETTER = "You are a writer.", "You are a careful writer."


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Proxy]]:
    directories = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    vllm, policy = PlayedVllm(directories[0]), {"publish": "lora", "directory": str(directories[0] / "policy")}
    with postgres_server() as server:
        store = {"url": server.new_database()}
        with in_this_process(directories[0], vllm, store=store, policy=policy) as one:
            upstreams = configuration(directories[0])["upstreams"]
            with in_this_process(directories[1], store=store, policy=policy, upstreams=upstreams) as other:
                other.vllm = vllm
                yield one, other


def test_a_promotion_counts_everywhere_and_rollouts_keep_what_they_began_with(two: tuple[Proxy, Proxy]) -> None:
    async def promotable() -> int:
        config = load_config(two[0].config)
        async with opened(config.store) as database:
            return await earlier_version(config, Store(database), two[0].directory)

    version = asyncio.run(promotable())
    assert two[0].chat("begun").headers["x-policy-version"] == "0"
    assert two[1].post("/policy/promote", {"version": version}).json["live"]
    for n, proxy in enumerate(two):
        assert proxy.chat(f"new-{n}").headers["x-policy-version"] == str(version)
        assert proxy.chat("begun").headers["x-policy-version"] == "0"


@pytest.mark.feature("prompts")
def test_a_prompt_and_its_promotion_count_everywhere(two: tuple[Proxy, Proxy]) -> None:
    prompt: Json = {"name": "writer", "text": OWN, "match": {"agent": "writer"}}
    assert two[0].post("/prompts", prompt).status == 200
    two[0].post("/prompts", {"name": "writer", "text": BETTER, "parent": 1})

    def shown() -> str:
        rollout = f"r{len(two[1].vllm.requests)}"  # each keeps what it began with
        two[1].chat(f"{rollout}/agents/writer", {"role": "system", "content": "Today is Monday."})
        return str(two[1].vllm.requests[-1]["messages"][0]["content"])

    wait_until(lambda: shown() == OWN, 20, "the first version is placed")
    assert two[0].post("/prompts/writer/promote", {"version": 2}).status == 200
    assert shown() == BETTER


def test_a_feed_shows_what_happens_through_another_proxy(two: tuple[Proxy, Proxy]) -> None:
    happened = set[str]()
    with two[1].client.stream("GET", f"{two[1].url}/feed", timeout=20) as feed:
        lines = feed.iter_lines()
        next(lines)  # it has begun
        two[0].chat("seen")
        two[0].reward("seen", 1)
        while not {"call", "reward", "rollout"} <= happened:
            line = next(lines)
            happened |= {line.removeprefix("event:").strip()} if line.startswith("event:") else set()
