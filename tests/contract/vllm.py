"""A played vLLM: a base model, adapters, merged weights under a label, and one chat route that returns tokens.

Attributes of `PlayedVllm` choose how it goes wrong; `answer` says what the model answers.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MOST_CHOICES = 128  # a fuzzer asks for more than fit in memory
PROMPT, ANSWER, LOGPROBS = [1, 2, 3], [5, 6], [-0.5, -1.5]


class PlayedVllm:
    """vLLM as an agent and the proxy's policy see it, served by `app`."""

    finish_reason = "stop"
    takes_tokens = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answer: Callable[[Json], Json] = self._by_model  # the message, from the request
        self.status = 200  # of each answer of a model
        self.returns_token_ids = True
        self.processed_logprobs = True  # taken after temperature
        self.stable_template = True  # a second turn begins as the first one was
        self.parses_tools = True
        self.sees_files = True  # of adapters
        self.guarded = False  # operator routes need a key
        self.refuses: dict[str, int] = {}  # paths, with a status
        self.odd: bytes | Handler | None = None  # every answer's body, or how models answer
        self.defaults: Json = {}  # its own sampling parameters
        self.delay_s = 0.0  # before an answer, and before each later chunk of a stream
        self.held: threading.Event | None = None  # an answer waits for it
        self.requests: list[Json] = []  # what models were asked, with "path" and "headers"
        self.before: Callable[[str], None] = lambda path: None  # what a trainer asks is answered
        self.restart()
        self.app = web.Application(middlewares=[self._refuse])
        add = self.app.router.add_route
        for path in ("/v1/models", "/weight_info", "/is_paused"):
            add("GET", path, self._state)
        add("POST", "/v1/chat/completions", self._chat)
        add("POST", "/v1/chat/completions/render", self._render)
        add("POST", "/tokenize", self._tokenize)
        add("POST", "/v1/load_lora_adapter", self._load)
        for path in ("pause", "resume", "collective_rpc", "update_weight_version", "reset_prefix_cache"):
            add("POST", f"/{path}", self._operate)

    def restart(self) -> None:
        """Forget everything, as vLLM does when it is started again."""
        self.adapters: dict[str, str] = {}
        self.weights, self.label, self.paused = str(self.root), "default", False

    def _by_model(self, body: Json) -> Json:
        return {"role": "assistant", "content": f"by {body['model']} with {Path(self.weights).name}"}

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_operators = not request.path.startswith("/v1/") or "adapter" in request.path
        has_key = "x-lightning-operator-key" in request.headers or request.path == "/tokenize"
        if self.guarded and is_operators and not has_key:
            return web.Response(status=401)
        if request.path in self.refuses:
            return _refusal(self.refuses[request.path], "no")
        if isinstance(self.odd, bytes):
            return web.Response(body=self.odd, content_type="application/json")
        if self.odd is not None and request.path in ("/v1/completions", "/v1/chat/completions"):
            return await self.odd(request)
        return await handler(request)

    async def _unfrozen(self) -> None:
        while self.paused:
            await asyncio.sleep(0.01)

    async def _state(self, _: web.Request) -> web.Response:
        """What any of its routes says that are only read."""
        base = {"id": "base", "object": "model", "parent": None, "root": str(self.root), "max_model_len": 512}
        adapters = [{"id": n, "object": "model", "parent": "base", "root": p} for n, p in self.adapters.items()]
        view = {"object": "list", "data": [base, *adapters], "weight_version": self.label, "is_paused": self.paused}
        return web.json_response(view)

    async def _operate(self, request: web.Request) -> web.Response:
        self.before(request.path)
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/pause" | "/resume":
                self.paused = request.path == "/pause"
            case "/collective_rpc":
                assert self.paused, "weights are replaced only while requests are frozen"
                self.weights = body["kwargs"]["weights_path"]
            case "/update_weight_version":
                self.label = body["new_version"]
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        self.before(request.path)
        body = await request.json()
        path = Path(body.get("lora_path", ""))
        if "lora_path" not in body:
            return _refusal(400, "no lora_path")
        if not self.sees_files:
            return _refusal(404, f"No adapter found for {path}")
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            return _refusal(400, "has already been loaded")
        if (path / "adapter_config.json").exists() and not [*path.glob("*.safetensors")]:
            return _refusal(500, f"{path} doesn't contain tensors")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="ok")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append({"path": request.path, "headers": dict(request.headers), **body})
        await asyncio.sleep(self.delay_s)
        while self.held and not self.held.is_set():
            await asyncio.sleep(0.01)
        await self._unfrozen()
        if self.status != 200:
            return _refusal(self.status, "busy")
        if body["model"] not in {"base", *self.adapters}:
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        if not isinstance(n := body.get("n") or 1, int) or n > MOST_CHOICES:
            return _refusal(400, f"n must be an integer of at most {MOST_CHOICES}")
        if body.get("tools") and not self.parses_tools:
            return _refusal(400, "tool choice requires --tool-call-parser to be set")
        if body.get("stream"):
            return await self._stream(request, body)
        return web.json_response(self._whole(body))

    def _sampled(self, body: Json) -> tuple[Json, list[int], list[int], list[float]]:
        """The message, the prompt's tokens, the answer's tokens, and their log-probabilities."""
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") if self.takes_tokens else None
        return self.answer(body), given or PROMPT, ANSWER, LOGPROBS

    def _whole(self, body: Json) -> Json:
        message, prompt, ids, logprobs = self._sampled(body)
        answer = chat_answer(message, prompt, ids, logprobs) | {"id": f"x{len(self.requests)}", "model": body["model"]}
        (choice,) = answer["choices"]
        choice["finish_reason"] = self.finish_reason
        if body.get("top_logprobs", 0) > 1:
            heat = body.get("temperature", 1.0) if self.processed_logprobs else 1.0
            top = [{"token": token, "logprob": value / heat} for token, value in (("a", -0.5), ("b", -1.5))]
            for entry in choice["logprobs"]["content"]:
                entry["top_logprobs"] = top
        if body.get("stop"):
            choice["stop_reason"] = body["stop"][0]
        if not self.returns_token_ids:
            del choice["token_ids"], answer["prompt_token_ids"]
        return answer | {"choices": [choice | {"index": i} for i in range(body.get("n") or 1)]}

    def _chunks(self, body: Json) -> Iterator[Json]:
        from traffic.server import chat_events  # imports this folder

        return chat_events(self._whole(body), body)

    async def _stream(self, request: web.Request, body: Json) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self._chunks(body):
            await self._unfrozen()
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(body.get("pause_s", self.delay_s))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        parameters = {name: body[name] for name in ("max_tokens", "temperature") if body.get(name) is not None}
        parameters = self.defaults | {"max_tokens": 500} | parameters
        if parameters["max_tokens"] == 16:  # its default, which vLLM leaves out
            del parameters["max_tokens"]
        return web.json_response({"token_ids": PROMPT, "sampling_params": parameters})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """A byte is a token; a turn is its text and an end."""
        body = await request.json()
        if "prompt" in body:
            return web.json_response({"tokens": list(body["prompt"].encode())})
        text = "".join(f"<{m['role']}>{m['content']}|" for m in body["messages"]) + "<assistant>"
        text = text if self.stable_template else f"{len(text)}{text}"
        return web.json_response({"tokens": list(text.encode())})


def chat_answer(message: Json, prompt: list[int], ids: list[int], logprobs: list[float]) -> Json:
    """As vLLM answers with its tokens."""
    logged = {"content": [{"token": "x", "logprob": v, "bytes": [120], "top_logprobs": []} for v in logprobs]}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids, "logprobs": logged}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    top = {"id": "c1", "object": "chat.completion", "created": 1, "model": "base", "usage": usage}
    return top | {"choices": [choice], "prompt_token_ids": prompt}


def _refusal(status: int, message: str) -> web.Response:
    kind = {404: "NotFoundError", 400: "BadRequestError"}.get(status, "server_error")
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)
