"""A vLLM that is played over transformers and talks: chat, completions, probes, and the operator's routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from support.small_model import VOCABULARY
from support.training import HonestServer

Json = dict[str, Any]
USER, ASSISTANT = 4, 5


class ChattingServer(HonestServer):
    """Words are tokens. Each attribute is a fault, set by a test."""

    greedy = False  # always the same answer
    drops_tokens = False  # earlier answers are not as they were
    own_temperature = 1.0  # of which it says nothing
    plain = False  # without operator routes
    forgets_adapters = False  # takes adapters, and does not have them
    deaf = False  # takes new weights, and answers with the old ones

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.loads: list[str] = []

    def load(self, name: str, path: str) -> None:
        self.loads.append(f"{name} {path}")
        if self.forgets_adapters and name != "base":
            return
        self.models[name] = self.models["base"] if self.deaf else self.open(path)

    async def handle(self, request: web.Request) -> web.Response:
        path, body = request.path, json.loads(await request.text() or "{}")
        if self.plain and (not path.startswith(("/v1/", "/tokenize")) or "lora" in path):
            return web.json_response({"detail": "Not Found"}, status=404)
        if (
            path == "/v1/load_lora_adapter"
            and not Path(body.get("lora_path", ""), "adapter_model.safetensors").exists()
        ):
            return web.json_response({"error": {"message": "it does not contain tensors"}}, status=500)
        if path == "/v1/unload_lora_adapter":
            self.models.pop(body["lora_name"], None)
            return web.json_response({})
        if path == "/v1/models":
            answer = json.loads((await super().handle(request)).body)  # type: ignore[arg-type]
            answer["data"][0]["max_model_len"] = 512
            return web.json_response(answer)
        if path == "/v1/chat/completions/render":
            return web.json_response({"token_ids": self.prompt(body["messages"]), "sampling_params": {}})
        if path == "/tokenize":
            tokens = self.prompt(body["messages"]) if "messages" in body else self.tokens(body["prompt"])
            return web.json_response({"tokens": tokens})
        if path == "/v1/chat/completions":
            return await self.chat(body)
        if path == "/v1/completions" and body["model"] in self.models and not isinstance(body["prompt"], str):
            return await self.complete(body)
        return await super().handle(request)

    def tokens(self, text: str) -> list[int]:
        """A word wN is token N, any other word some token."""
        return [int(w[1:]) if w[0] == "w" and w[1:].isdigit() else 6 + len(w) % 8 for w in text.split()]

    def prompt(self, messages: Sequence[Json]) -> list[int]:
        ids = [0]
        for i, message in enumerate(messages):
            said = self.tokens(message["content"])
            if self.drops_tokens and message["role"] == "assistant" and i + 1 < len(messages):
                said = said[1:]
            ids += [USER if message["role"] == "user" else ASSISTANT, *said]
        return [*ids, ASSISTANT]

    async def chat(self, body: Json) -> web.Response:
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": f"The model {body['model']} does not exist."}}, status=404)
        prompt = self.prompt(body["messages"])
        ids, tops = await asyncio.to_thread(self.continued, body["model"], prompt, body)
        entries = [{"token": f"w{i}", "logprob": top[i]} for i, top in zip(ids, tops, strict=True)]
        for entry, top in zip(entries, tops, strict=True):
            best = sorted(top, key=lambda i: -top[i])[: body.get("top_logprobs") or 0]
            entry["top_logprobs"] = [{"token": f"w{i}", "logprob": top[i]} for i in best]
        message = {"role": "assistant", "content": " ".join(f"w{i}" for i in ids)}
        choice = {"index": 0, "message": message, "finish_reason": "length", "token_ids": ids}
        choice["logprobs"] = {"content": entries}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(answer | {"usage": usage, "prompt_token_ids": prompt})

    async def complete(self, body: Json) -> web.Response:
        ids, tops = await asyncio.to_thread(self.continued, body["model"], body["prompt"], body)
        logprobs: Json = {"token_logprobs": [top[i] for i, top in zip(ids, tops, strict=True)]}
        logprobs["tokens"] = [f"token_id:{i}" for i in ids]
        logprobs["top_logprobs"] = [{f"token_id:{i}": value for i, value in top.items()} for top in tops]
        return web.json_response({"choices": [{"token_ids": ids, "logprobs": logprobs}]})

    @torch.no_grad()
    def continued(self, model: str, prompt: Sequence[int], body: Json) -> tuple[list[int], list[dict[int, float]]]:
        """The sampled tokens, and at each place the log-probability of every token."""
        ids, tops, heat = list(prompt), [], (body.get("temperature") or 1.0) * self.own_temperature
        seed = body.get("seed")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(body.get("max_tokens") or 4):
            logits = self.models[model](input_ids=torch.tensor([ids])).logits[0, -1].float()
            found = (logits / heat).log_softmax(-1)
            picked = found.argmax() if self.greedy else torch.multinomial(found.exp(), 1, generator=generator)
            ids.append(int(picked))
            tops.append(dict(enumerate(found.tolist()[:VOCABULARY])))
        return ids[len(prompt) :], tops


@asynccontextmanager
async def chatting(base: Path, **faults: Any) -> AsyncIterator[tuple[ChattingServer, str]]:
    """Yields the server and its base URL."""
    server = ChattingServer(base)
    for name, value in faults.items():
        assert hasattr(server, name)
        setattr(server, name, value)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
