"""One vLLM behind two proxies, which hand conversations on as exact tokens and as text."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from contract.real import System
from contract.system import CLI, free_port, wait_until
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import ModelCall
from lightning_proxy.serving.operator import key_file
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.types import Sampling
from support.twice import get

Json = dict[str, Any]
SENTENCE = "The astonishingly quick fox jumps over 1234 lazy dogs, doesn't it?"


@dataclass
class Served:
    """One vLLM behind both proxies, by `policy.token_continuity`."""

    config: Path
    url: dict[str, str]
    store: dict[str, Path]
    clients: list[openai.OpenAI | anthropic.Anthropic] = field(default_factory=list)

    def client(self, way: str, rollout: str) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url[way]}/rollouts/{rollout}/v1", api_key="unused")
        self.clients.append(client)
        return client

    def calls(self, way: str, rollout: str) -> list[ModelCall]:
        async def read() -> list[ModelCall]:
            async with opened(StoreConfig(url=f"sqlite:///{self.store[way]}")) as database:
                return await Store(database).calls.of(rollout)

        return asyncio.run(read())

    def rows(self, way: str, rollout: str) -> int:
        calls = self.calls(way, rollout)
        assert all(call.trainable for call in calls), [call.untrainable_reason for call in calls]
        plain = {"sampled": lambda _: Sampling()}  # their grammar is of no account here
        return len(rollout_samples(calls, [1.0] * len(calls), task_id=None, max_tokens=10_000, **plain).samples)

    def outcomes(self, way: str) -> dict[str, int]:
        text = urllib.request.urlopen(f"{self.url[way]}/metrics").read().decode()
        lines = (line for line in text.splitlines() if line.startswith("lightning_token_continuity_total{"))
        return {line.split('"')[1]: int(float(line.split()[1])) for line in lines}

    def serve_adapter(self, way: str, directory: Path) -> None:
        """Make an adapter live, as the policy version that the trainer would have published it as."""

        async def record() -> int:
            async with opened(StoreConfig(url=f"sqlite:///{self.store[way]}")) as database:
                store = Store(database)
                version = await store.versions.new("lora", 1, {})
                await store.versions.saved(version, str(directory), f"continuity-v{version}")
                await store.versions.set_live(version)
                await store.versions.set_live(0)
                return version

        self.promote(way, asyncio.run(record()))

    def promote(self, way: str, version: int) -> None:
        body = json.dumps({"version": version}).encode()
        headers = {"content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{self.url[way]}/policy/promote", body, headers)).close()


@contextmanager
def two_proxies(system: System, directory: Path) -> Iterator[Served]:
    """Two proxies of their own in front of the shared vLLM; its weights stay."""
    found = Served(system.config, {}, {})
    parts: list[subprocess.Popen[bytes]] = []
    (directory / "policy").mkdir()
    shutil.copy(key_file(system.directory / "policy"), key_file(directory / "policy"))
    try:
        for way in ("exact", "text"):
            port, found.store[way] = free_port(), directory / f"{way}.db"
            found.url[way] = f"http://127.0.0.1:{port}"
            environment = {
                "LIGHTNING_PROXY__PORT": str(port),
                "LIGHTNING_STORE__URL": f"sqlite:///{found.store[way]}",
                "LIGHTNING_POLICY__TOKEN_CONTINUITY": way,
                "LIGHTNING_POLICY__DIRECTORY": str(directory / "policy"),
                "LIGHTNING_POLICY__PUBLISH": "lora",
            }
            with (directory / "log").open("ab") as log:
                command = [*CLI, "--config", str(system.config), "serve"]
                parts.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment))
        for url in found.url.values():
            wait_until(lambda url=url: get(f"{url}/readyz"), 480, f"{url} is ready")
        yield found
    finally:
        for client in found.clients:
            client.close()
        for started in parts:
            started.send_signal(signal.SIGINT)
        for started in parts:
            started.wait(60)


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
