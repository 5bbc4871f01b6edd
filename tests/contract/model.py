"""A played vLLM over a real model: answers are sampled from the weights that were loaded, as vLLM's are.

`Faulty` names how one goes wrong with new weights; `play` records groups that a trainer can learn from.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch
from aiohttp import web
from peft import PeftModel
from transformers import AutoModelForCausalLM

from contract.system import Answer, Proxy, in_this_process
from contract.vllm import PlayedVllm
from support.models import VOCABULARY

Json = dict[str, Any]
GROUP = 4
TRAINER: Json = {
    "group_size": GROUP, "tasks_per_step": 2, "learning_rate": 0.05, "report_to": [], "dtype": "float32", "threads": 1,
    "max_staleness": 1000,
}  # fmt: skip


class Faulty(Enum):
    """What a server does with new weights in place of loading them."""

    STALE = auto()  # it says yes and goes on serving the old ones
    HALF = auto()  # it loads half of them
    WRONG = auto()  # it loads others


def weights_in(path: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def fingerprint(model: Any) -> str:
    return sha256(b"".join(weight.numpy().tobytes() for weight in model.state_dict().values())).hexdigest()


class ModelVllm(PlayedVllm):
    """Samples from the model in a directory, and from each adapter and each weights that were loaded."""

    finish_reason = "length"

    def __init__(self, root: Path) -> None:
        self.fault: Faulty | None = None
        self.is_away = False  # when the trainer asks
        super().__init__(root)
        self.app.router.add_post("/v1/completions", self._complete)
        self.app.router.add_post("/v1/unload_lora_adapter", self._unload)

    def _open(self, path: str) -> Any:
        model = weights_in(self.root)
        if path == str(self.root) or self.fault is Faulty.STALE:
            return model
        if (Path(path) / "adapter_config.json").exists():
            new = PeftModel.from_pretrained(weights_in(self.root), path).merge_and_unload()
        else:
            new = weights_in(path)
        with torch.no_grad():
            for i, (old, weight) in enumerate(zip(model.parameters(), new.parameters(), strict=True)):
                if self.fault is Faulty.WRONG:
                    old.add_(torch.randn(old.shape) * 0.2)
                elif self.fault is None or i % 2:
                    old.copy_(weight)
        return model

    async def _operate(self, request: web.Request) -> web.Response:
        answer = await super()._operate(request)
        if request.path == "/collective_rpc":
            self._loaded["base"] = self._open(self.weights)
        return answer

    async def _load(self, request: web.Request) -> web.Response:
        answer = await super()._load(request)
        if answer.status == 200:
            name = (await request.json())["lora_name"]
            self._loaded[name] = self._open(self.adapters[name])
        return answer

    def restart(self) -> None:
        super().restart()
        self._loaded: dict[str, Any] = {"base": self._open(str(self.root))}

    async def _unload(self, request: web.Request) -> web.Response:
        self.before(request.path)
        name = (await request.json())["lora_name"]
        self.adapters.pop(name, None)
        self._loaded.pop(name, None)
        return web.Response(text="ok")

    async def _complete(self, request: web.Request) -> web.Response:
        """Answer a prompt of token ids, as the publisher asks."""
        self.before(request.path)
        if self.is_away:
            assert request.transport is not None
            request.transport.abort()
        body = await request.json()
        if body["model"] not in self._loaded:
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        ids, logprobs = await asyncio.to_thread(self._sample, body["model"], body["prompt"], body["max_tokens"])
        return web.json_response({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]})

    def _sampled(self, body: Json) -> tuple[Json, list[int], list[int], list[float]]:
        prompt = [0, *(token for message in body["messages"] for token in _tokens(message))]
        ids, logprobs = self._sample(body["model"], prompt, body.get("max_tokens") or 4, body.get("temperature", 1.0))
        return {"role": "assistant", "content": " ".join(f"w{i}" for i in ids)}, prompt, ids, logprobs

    def _whole(self, body: Json) -> Json:
        return super()._whole(body) | {"system_fingerprint": fingerprint(self._loaded[body["model"]])}

    @torch.no_grad()
    def _sample(self, name: str, prompt: list[int], tokens: int, heat: float = 1.0) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        for _ in range(tokens):
            logits = self._loaded[name](input_ids=torch.tensor([ids])).logits[0, -1].float()
            hot = (logits / heat).log_softmax(-1)
            ids.append(int(torch.multinomial(hot.exp(), 1)))
            logprobs.append(float((hot if self.processed_logprobs else logits.log_softmax(-1))[ids[-1]]))
        return ids[len(prompt) :], logprobs


def _tokens(message: Json) -> list[int]:
    """An answer that is sent back has the tokens that were sampled; of other texts, each letter is one."""
    text = str(message["content"])
    if message["role"] == "assistant":
        return [int(word[1:]) for word in text.split()]
    return [2 + ord(letter) % (VOCABULARY - 2) for letter in text]


@contextmanager
def learning(directory: Path, base: Path, publish: str, *, trainer: Json = TRAINER, **policy: Any) -> Iterator[Proxy]:
    sections = {"policy": {"model": str(base), "publish": publish} | policy, "trainer": trainer}
    with in_this_process(directory, ModelVllm(base), **sections) as proxy:
        yield proxy


class Agents:
    """Agents that ask without a pause, in a block; `renewed`: three times a second, each time in a new rollout."""

    def __init__(self, proxy: Proxy, *names: str, renewed: bool = False) -> None:
        self.proxy, self.renewed, self.stopped, self.statuses = proxy, renewed, threading.Event(), list[int]()
        self.threads = [threading.Thread(target=self._work, args=[name]) for name in names]

    def _work(self, name: str) -> None:
        while not self.stopped.wait(0.3 * self.renewed):
            rollout = f"{name}-{len(self.statuses)}" if self.renewed else name
            self.statuses.append(ask(self.proxy, rollout, name, mode="eval").status)

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def ask(proxy: Proxy, name: str, task: str, mode: str = "train", tokens: int = 6, **fields: Any) -> Answer:
    body = {"model": "policy", "messages": [{"role": "user", "content": task}], "max_tokens": tokens, **fields}
    return proxy.post(f"/rollouts/{name}/tasks/{task}/v1/chat/completions", body, X_Rollout_Mode=mode)


def play(proxy: Proxy, prefix: str, tasks: int = 2, mode: str = "train", tokens: int = 6, **fields: Any) -> list[str]:
    """Whole groups of rollouts; returns their names."""
    names = []
    for task in range(tasks):
        for sibling in range(GROUP):
            names.append(name := f"{prefix}-{task}-{sibling}")
            assert ask(proxy, name, f"{prefix}-{task}", mode, tokens, **fields).status == 200
            (call,) = proxy.rollout(name)["calls"]
            even = sum(token % 2 == 0 for token in call["response_token_ids"]) / tokens
            proxy.reward(name, even + sibling / 100)
    return names


def versions(proxy: Proxy) -> dict[int, Json]:
    return {found["version"]: found for found in proxy.get("/policy/versions")["data"]}


def by_weights(proxy: Proxy) -> dict[int, set[str]]:
    """By version, which weights answered; calls during which a version went live are left out."""
    found: dict[int, set[str]] = {}
    for rollout in proxy.get("/rollouts?limit=1000")["data"]:
        for call in proxy.rollout(rollout["rollout_id"])["calls"]:
            assert call["status"] == "ok", call
            if call["policy_versions"] == [call["policy_version"]]:
                found.setdefault(call["policy_version"], set()).add(call["response"]["system_fingerprint"])
    return found
