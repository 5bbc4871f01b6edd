"""One vLLM behind two proxies, which hand conversations on as exact tokens and as text."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from contract.real import System
from contract.system import Process, free_port, write_config
from contract.system import Served as Proxy
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import ModelCall
from lightning_proxy.serving.operator import key_file
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.types import Sampling
from support.stores import store_url

Json = dict[str, Any]
SENTENCE = "The astonishingly quick fox jumps over 1234 lazy dogs, doesn't it?"


class Served:
    """One vLLM behind both proxies, by `policy.token_continuity`."""

    def __init__(self, system: System, directory: Path) -> None:
        policy = directory / "policy"
        policy.mkdir()
        shutil.copy(key_file(system.directory / "policy"), key_file(policy))
        self.clients: list[openai.OpenAI] = []
        self.proxies: dict[str, Proxy] = {}
        for way in ("exact", "text"):
            port, own = free_port(), directory / way
            own.mkdir()
            settings = {"token_continuity": way, "directory": str(policy), "publish": "lora"}
            write_config(own, f"http://127.0.0.1:{system.vllm_port}/v1", port, policy=settings)
            self.proxies[way] = Proxy(f"http://127.0.0.1:{port}", own, server=Process(own, "serve"))
        self.url = {way: proxy.url for way, proxy in self.proxies.items()}

    def client(self, way: str, rollout: str) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url[way]}/rollouts/{rollout}/v1", api_key="unused")
        self.clients.append(client)
        return client

    @asynccontextmanager
    async def store(self, way: str) -> AsyncIterator[Store]:
        async with opened(StoreConfig(url=store_url(self.proxies[way].directory))) as database:
            yield Store(database)

    def calls(self, way: str, rollout: str) -> list[ModelCall]:
        async def read() -> list[ModelCall]:
            async with self.store(way) as store:
                return await store.calls.of(rollout)

        return asyncio.run(read())

    def rows(self, way: str, rollout: str) -> int:
        calls = self.calls(way, rollout)
        assert all(call.trainable for call in calls), [call.untrainable_reason for call in calls]
        plain = {"sampled": lambda _: Sampling()}  # their grammar is of no account here
        return len(rollout_samples(calls, [1.0] * len(calls), task_id=None, max_tokens=10_000, **plain).samples)

    def outcomes(self, way: str) -> dict[str, int]:
        text = self.proxies[way].call("GET", "/metrics").body.decode()
        lines = (line for line in text.splitlines() if line.startswith("lightning_token_continuity_total{"))
        return {line.split('"')[1]: int(float(line.split()[1])) for line in lines}

    def serve_adapter(self, way: str, directory: Path) -> None:
        """Make an adapter live, as the policy version that the trainer would have published it as."""

        async def record() -> int:
            async with self.store(way) as store:
                version = await store.versions.new("lora", 1, {})
                await store.versions.saved(version, str(directory), f"continuity-v{version}")
                await store.versions.set_live(version)
                await store.versions.set_live(0)
                return version

        self.promote(way, asyncio.run(record()))

    def promote(self, way: str, version: int) -> None:
        assert self.proxies[way].post("/policy/promote", {"version": version}).status == 200


@contextmanager
def two_proxies(system: System, directory: Path) -> Iterator[Served]:
    """Two proxies of their own in front of the shared vLLM; its weights stay."""
    served = Served(system, directory)
    try:
        for proxy in served.proxies.values():
            proxy.server.start()
        for proxy in served.proxies.values():
            proxy.wait_for("/readyz", 480)
        yield served
    finally:
        for client in served.clients:
            client.close()
        for proxy in served.proxies.values():
            proxy.client.close()
            proxy.server.end(signal.SIGINT)


def say(client: openai.OpenAI, messages: list[Any], text: str, *, stream: bool, **more: Any) -> Any:
    """The answer's choice; a streamed one as the client assembles it. `text`: what the model is to say."""
    asked: Json = {"model": "policy", "messages": messages, "temperature": 1.0, "max_tokens": 200} | more
    asked["extra_body"] = {"structured_outputs": {"choice": [text]}}
    if not stream:
        return client.chat.completions.create(**asked).choices[0]
    state = ChatCompletionStreamState(input_tools=more.get("tools", openai.NOT_GIVEN))
    for chunk in client.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0]


def converse(client: openai.OpenAI, *, stream: bool) -> list[str | None]:
    """Four turns, one of them cut short and one stopped by a string; what the agent was told."""
    messages: list[Any] = [{"role": "system", "content": "You are brief."}]
    told = []
    for turn, more in enumerate(({}, {"max_tokens": 6}, {"stop": ["lazy"], "logprobs": True}, {"top_p": 0.9})):
        messages.append({"role": "user", "content": f"Say it again, {turn} times."})
        choice = say(client, messages, SENTENCE, stream=stream, **more)
        assert choice.finish_reason == ("length" if turn == 1 else "stop")
        assert (choice.logprobs is not None) == ("logprobs" in more)
        messages.append(choice.message.model_dump(exclude_none=True))
        told.append(choice.message.content)
    return told
