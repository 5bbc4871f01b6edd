"""A Tinker service on loopback that trains for real, by transformers and PEFT. Its messages are the client's own."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from aiohttp import web
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tinker.proto import tinker_public_pb2 as pb
from transformers import AutoModelForCausalLM

PROTOBUF = "application/x-protobuf"
FORGOTTEN = {"detail": "the model is not there"}


class Model:
    """An adapter on the base model, and its optimizer."""

    def __init__(self, base: Path, rank: int) -> None:
        torch.manual_seed(0)
        config = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.steps = 0

    def state(self) -> Any:
        return copy.deepcopy((get_peft_model_state_dict(self.model), self.optimizer.state_dict(), self.steps))

    def restore(self, state: Any) -> None:
        weights, optimizer, self.steps = copy.deepcopy(state)
        self.model.load_state_dict(
            {name.replace(".weight", ".default.weight"): value for name, value in weights.items()}, strict=False
        )
        self.optimizer.load_state_dict(optimizer)

    def run(self, request: Any, data: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        """The log-probabilities of each datum's targets. Gradients are added unless it is a forward pass alone."""
        found, total = [], torch.zeros(())
        for datum in data:
            logits = self.model(input_ids=torch.tensor(datum["tokens"][None].astype(np.int64))).logits[0].float()
            targets = torch.tensor(datum["target_tokens"])
            logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
            found.append(logprobs.detach().numpy())
            if not request.forward_only:
                ratio = (logprobs - torch.tensor(datum["logprobs"])).exp()
                low, high = (request.loss_fn_config[f"clip_{side}_threshold"] for side in ("low", "high"))
                advantages = torch.tensor(datum["advantages"])
                total = total - (ratio.detach().clamp(low, high) * logprobs * advantages).sum()
        if not request.forward_only:
            total.backward()
        return found

    def step(self, adam: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"]), "eps": adam["eps"]}
            group["weight_decay"] = adam["weight_decay"]
        if adam["grad_clip_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), adam["grad_clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def files(self) -> dict[str, bytes]:
        with TemporaryDirectory() as directory:
            self.model.save_pretrained(directory)
            names = ("adapter_model.safetensors", "adapter_config.json")
            return {name: (Path(directory) / name).read_bytes() for name in names}


class PlayedTinker:
    """`got` has what was executed. `faults` maps a route to what happens to the next requests for it, in order.

    403, 503: an answer of this status. lost: it is executed, and the connection breaks. failed, refused: the future is,
    as the service's fault or the user's. forgotten: it is executed, and then no model is there any more.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.models: dict[str, Model] = {}
        self.states: dict[str, Any] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.got: list[tuple[str, Any]] = []
        self.faults: dict[str, list[str]] = {}
        self.keys: set[str | None] = set()
        self._futures: dict[str, Any] = {}
        self._seen: dict[tuple[Any, ...], str] = {}
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("X-API-Key"))
        route = request.path.removeprefix("/api/v1/")
        content = await request.read()
        kind = "files" if route.startswith("files/") else route
        fault = next(iter(self.faults.get(kind, [])), None)
        if fault is not None:
            self.faults[kind].pop(0)
        if fault in ("403", "503"):
            return web.json_response({"error": "not now"}, status=int(fault))
        answer = self._answer(route, request, content, fault)
        if fault == "lost" and request.transport is not None:
            request.transport.abort()
        if fault == "forgotten":
            self.models.clear()
        return answer

    def _answer(self, route: str, request: web.Request, content: bytes, fault: str | None) -> web.Response:
        if route == "retrieve_future":
            return self._future(request, content)
        if route.startswith("files/"):
            _, name, file = route.split("/")
            return web.Response(body=self.files[name][file])
        if route.endswith("external_weights_urls"):
            name = route.split("/")[-2]
            urls = {file: f"{self.url}/api/v1/files/{name}/{file}?signature={SIGNATURE}" for file in self.files[name]}
            return web.json_response({"urls": urls, "expires": "2100-01-01T00:00:00Z"})
        body: Any
        if route == "forward_backward":
            body = pb.ForwardBackwardRequest.FromString(content)
            key: tuple[Any, ...] = (body.model_id, body.seq_id)
        else:
            body = json.loads(content or "{}")
            key = (body.get("model_id", body.get("session_id")), body.get("seq_id", f"m{body.get('model_seq_id')}"))
        if route == "create_session":
            return web.json_response({"session_id": f"s{len(self._futures)}-{len(self.got)}"})
        if route == "get_info":
            return web.json_response({"model_id": body["model_id"], "model_data": {}})
        if route not in EXECUTED:
            return web.json_response({})
        if key not in self._seen:
            self._seen[key] = str(len(self._futures))
            self._futures[self._seen[key]] = self._execute(route, body, fault)
        return web.json_response({"request_id": self._seen[key]})

    def _execute(self, route: str, body: Any, fault: str | None) -> Any:
        if fault in ("failed", "refused"):
            return {"error": f"{route} {fault}", "category": "user" if fault == "refused" else "server"}
        model_id = getattr(body, "model_id", None) or (body.get("model_id") if isinstance(body, dict) else None)
        if route in ("create_model", "load_weights"):
            model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
            model = self.models[model_id] = Model(self.base, 4)
            if route == "load_weights":
                if body["path"] not in self.states:
                    return {"error": "no such state", "category": "user"}
                assert body["optimizer"]
                model.restore(self.states[body["path"]])
            self.got.append((route, body))
            return {"model_id": model_id}
        if model_id not in self.models:
            return {"error": FORGOTTEN["detail"], "category": "server"}
        return self._of_model(route, body, model_id)

    def _of_model(self, route: str, body: Any, model_id: str) -> Any:
        model = self.models[model_id]
        if route == "forward_backward":
            data = [_datum(datum) for datum in body.data]
            self.got.append(("forward" if body.forward_only else route, (body, data)))
            return _output(model.run(body, data))
        self.got.append((route, body))
        if route == "optim_step":
            model.step(body["adam_params"])
            return {"metrics": {}}
        kind = "weights" if route == "save_weights" else "external_weights"
        path = f"tinker://{model_id}/{kind}/{body['path']}"
        if kind == "weights":
            self.states[path] = model.state()
        else:
            self.files[body["path"]] = model.files()
        return {"path": path}

    def _future(self, request: web.Request, content: bytes) -> web.Response:
        found = self._futures[json.loads(content)["request_id"]]
        if isinstance(found, bytes):
            return web.Response(body=found, content_type=PROTOBUF)
        return web.json_response(found)

    def count(self, route: str) -> int:
        return sum(name == route for name, _ in self.got)


SIGNATURE = "lets-in-who-has-it"
EXECUTED = {"create_model", "load_weights", "forward_backward", "optim_step", "save_weights", "save_weights_external"}
TYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}


def _datum(datum: Any) -> dict[str, np.ndarray]:
    (chunk,) = datum.model_input
    inputs = {
        name: np.frombuffer(value.dense, TYPES[value.dtype]).copy() for name, value in datum.loss_fn_inputs.items()
    }
    return {"tokens": np.frombuffer(chunk.encoded_text.tokens, np.int32), **inputs}


def _output(rows: list[np.ndarray]) -> bytes:
    sizes = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64)
    content = io.BytesIO()
    for row in rows:
        content.write(row.astype(np.float32).tobytes())
    tensor = pb.BatchedTensor(data=content.getvalue(), offsets=sizes.tobytes(), dtype=pb.DTYPE_FLOAT32)
    record = pb.ArrayRecord(num_datums=len(rows), fields={"logprobs": tensor})
    return bytes(
        pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record]).SerializeToString()
    )


@contextmanager
def played_tinker(base: Path) -> Iterator[PlayedTinker]:
    """Serve it from a thread of its own, so that a test may wait for an answer in its own loop."""
    played, loop = PlayedTinker(base), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", played.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        played.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield played
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
