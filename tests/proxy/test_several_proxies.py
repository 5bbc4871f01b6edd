"""Two proxies over one PostgreSQL: what one of them writes, the other one knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.system import Answer, Json, Proxy, configuration, in_this_process, wait_until
from contract.vllm import PlayedVllm
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.serving.swap import swap_lock
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.served import saved_version
from support.stores import postgres_server

CHAT = "/v1/chat/completions"
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


def ask(proxy: Proxy, text: str, key: str | None = None, **headers: str) -> Answer:
    return proxy.post(CHAT, {"model": "policy", "messages": [{"role": "user", "content": text}]}, key, **headers)


def earlier_version(proxy: Proxy) -> int:
    """A version that was live once."""

    async def make() -> int:
        config = configuration(proxy.directory)
        async with opened(StoreConfig.model_validate(config["store"])) as database:
            store = Store(database)
            version = await saved_version(store, "lora", proxy.directory)
            async with swap_lock(Path(config["policy"]["directory"])):
                await store.versions.set_live(version, 1)
                await store.versions.set_live(0)
            return version

    return asyncio.run(make())


def test_a_promotion_counts_everywhere_and_rollouts_keep_what_they_began_with(two: tuple[Proxy, Proxy]) -> None:
    version = earlier_version(two[0])
    assert ask(two[0], "a", X_Rollout_Id="begun").headers["x-policy-version"] == "0"
    assert two[1].post("/policy/promote", {"version": version}).json["live"]
    for proxy in two:
        assert ask(proxy, "b").headers["x-policy-version"] == str(version)
        assert ask(proxy, "c", X_Rollout_Id="begun").headers["x-policy-version"] == "0"


@pytest.mark.feature("prompts")
def test_a_prompt_and_its_promotion_count_everywhere(two: tuple[Proxy, Proxy]) -> None:
    prompt: Json = {"name": "writer", "text": OWN, "match": {"agent": "writer"}}
    assert two[0].post("/prompts", prompt).status == 200
    two[0].post("/prompts", {"name": "writer", "text": BETTER, "parent": 1})

    def shown() -> str:
        messages = [{"role": "system", "content": "Today is Monday."}, {"role": "user", "content": "w"}]
        two[1].post(CHAT, {"model": "policy", "messages": messages}, X_Agent_Name="writer")
        assert two[1].vllm is not None
        return str(two[1].vllm.requests[-1]["messages"][0]["content"])

    wait_until(lambda: shown() == OWN, 20, "the first version is placed")
    assert two[0].post("/prompts/writer/promote", {"version": 2}).status == 200
    assert shown() == BETTER


def test_a_feed_shows_what_happens_through_another_proxy(two: tuple[Proxy, Proxy]) -> None:
    happened = set[str]()
    with two[1].client.stream("GET", f"{two[1].url}/feed", timeout=20) as feed:
        lines = feed.iter_lines()
        next(lines)  # it has begun
        ask(two[0], "a", X_Rollout_Id="seen")
        two[0].post("/reward", {"rollout_id": "seen", "reward": 1})
        while not {"call", "reward", "rollout"} <= happened:
            line = next(lines)
            happened |= {line.removeprefix("event:").strip()} if line.startswith("event:") else set()


def test_keys_are_known_everywhere_and_forgotten_everywhere(two: tuple[Proxy, Proxy]) -> None:
    (made,) = two[0].post("/rollouts", {"task_id": "t"}).json
    assert ask(two[1], "a", made["api_key"]).headers["x-rollout-id"] == made["rollout_id"]
    key = two[0].new_key("agent")
    wait_until(lambda: two[1].call("GET", "/rollouts").status == 401, 20, "there is a key")
    assert [ask(proxy, "b", key).status for proxy in two] == [200, 200]
    assert two[0].run("keys", "revoke", "agent").returncode == 0
    wait_until(lambda: [ask(proxy, "c", key).status for proxy in two] == [401, 401], 20, "it is revoked")
