"""Steps on a Tinker service: the exact datums, resume, faults, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, TrainingUnavailable
from lightning_proxy.trainer.types import Batch, Sample

pytest.importorskip("tinker", reason="the client of the Tinker API is not installed")

from tinker.proto import tinker_public_pb2 as pb

from lightning_proxy.features.tinker import trainer as plugin
from lightning_proxy.features.tinker.tinker_trainer import TinkerTrainer
from lightning_proxy.features.tinker.trainer import check_backend
from support.sections import with_features
from support.training import bench

# The client leaves connections to the collector, and threads that a process of tests had better not share with others.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.long]
PROMPT, ANSWER = (3, 4), (5, 6, 7)


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


@pytest.fixture(autouse=True, scope="module")
def left_open() -> None:
    """Nothing is looked for: the client's thread keeps its loop and connections for as long as the process runs."""


@pytest.fixture
def service(base: Path) -> Iterator[PlayedTinker]:
    with played_tinker(base) as played:
        yield played
        while OPEN:
            OPEN.pop().close()
    gc.collect()


OPEN: list[Any] = []


def trainer(base: Path, directory: Path, service: PlayedTinker, **settings: Any) -> TinkerTrainer:
    config = configured(base, directory, service, **settings)
    OPEN.append(TinkerTrainer(config.trainer, config.policy))
    return OPEN[-1]


def configured(base: Path, directory: Path, service: PlayedTinker, **settings: Any) -> Config:
    ours = {"backend": True, "tinker": {"base_url": service.url}, "report_to": [], "lora_rank": 4}
    policy = {"model": str(base), "publish": "lora", "directory": directory}
    return with_features(policy=policy, trainer={**ours, "learning_rate": 0.05, **settings})


def sample(name: str, advantage: float, temperature: float = 1.0) -> Sample:
    mask, n = (0,) * len(PROMPT) + (1,) * len(ANSWER), len(PROMPT + ANSWER)
    given = tuple(-3.0 * m for m in mask), tuple(advantage * m for m in mask)
    return Sample(name, "t", PROMPT + ANSWER, mask, *given, tuple(temperature if m else 1.0 for m in mask[:n]))


def batch(step: int = 1, *samples: Sample) -> Batch:
    chosen = samples or (sample("a", 1.0), sample("b", -1.0))
    return Batch(step, chosen, tuple(s.rollout_id for s in chosen), compared=len(chosen))


def test_the_service_gets_tokens_sampled_logprobs_and_weighted_advantages(
    base: Path, tmp_path: Path, service: PlayedTinker
) -> None:
    metrics = trainer(base, tmp_path, service).step(batch())
    body, data = dict(service.got)["forward_backward"]
    assert body.loss_fn == "cispo"
    assert dict(body.loss_fn_config) == {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
    assert [sorted(datum) for datum in data] == [["advantages", "logprobs", "target_tokens", "tokens"]] * 2
    assert data[0]["tokens"].tolist() == [3, 4, 5, 6]
    assert data[0]["target_tokens"].tolist() == [4, 5, 6, 7]
    assert data[0]["logprobs"].tolist() == [0.0, -3.0, -3.0, -3.0]
    np.testing.assert_allclose(data[0]["advantages"], [0.0, *(3 * [1 / 6])], rtol=1e-6)  # two rollouts, three tokens
    np.testing.assert_allclose(data[1]["advantages"], [0.0, *(3 * [-1 / 6])], rtol=1e-6)
    adam = dict(service.got)["optim_step"]["adam_params"]
    assert (adam["learning_rate"], adam["grad_clip_norm"], adam["beta2"], adam["eps"]) == (0.05, 1.0, 0.999, 1e-8)
    assert (metrics["skipped"], metrics["trained_tokens"], metrics["lr"]) == (0.0, 6.0, 0.05)
    assert service.keys == {"tml-none"}


def test_a_mean_on_the_service_is_undone(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    mean = {"base_url": service.url, "reduction": "mean"}
    metrics = trainer(base, tmp_path, service, tinker=mean).step(batch())
    _, data = dict(service.got)["forward_backward"]
    np.testing.assert_allclose(data[0]["advantages"], [0.0, *(3 * [8 / 6])], rtol=1e-6)  # times 4 tokens, 2 rows
    assert metrics["loss"] == pytest.approx(trainer(base, tmp_path, service).step(batch())["loss"], rel=1e-5)


def test_answers_at_other_temperatures_are_left_out_by_name(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t = trainer(base, tmp_path, service)
    assert t.step(batch(1, sample("a", 1.0), sample("hot", -1.0, 1.5)))["trained_tokens"] == 3
    assert t.left_out_because is not None
    assert "hot" in t.left_out_because
    assert t.step(batch(2, sample("hot", -1.0, 1.5)))["skipped"] == 1
    assert t.skipped_because is not None
    assert service.count("optim_step") == 1


def test_a_wrong_sampler_skips_the_step(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t, n = trainer(base, tmp_path, service), len(PROMPT + ANSWER)
    given = [replace(sample(str(i), (-1.0) ** i), versions=(2,), logprobs=(-9.0,) * n) for i in range(90)]
    wrong = t.step(replace(batch(1, *given), version=2))
    assert (wrong["skipped"], wrong["trained_tokens"], service.count("optim_step")) == (1, 270, 0)
    assert wrong["sampler_difference"] > 0.3 and t.skipped_because == t.warnings["sampler"]
    assert t.step(replace(batch(2, *given), version=3))["skipped"] == 0, "of an earlier version"
    assert t.warnings == {}


def test_a_killed_trainer_goes_on_exactly_from_its_last_checkpoint(
    base: Path, tmp_path: Path, service: PlayedTinker
) -> None:
    steady = trainer(base, tmp_path / "steady", service)
    steady.step(batch(1))
    steady.step(batch(2))
    killed = trainer(base, tmp_path / "killed", service)
    killed.step(batch(1))
    killed.save(tmp_path / "1")
    killed.step(batch(2))  # sent, applied, and not committed
    resumed = trainer(base, tmp_path / "killed", service)
    assert resumed.load(tmp_path / "1") == 1
    resumed.step(batch(2))
    rows = [[*PROMPT, *ANSWER]]
    assert resumed.logprobs(rows) == steady.logprobs(rows)


def test_auto_keeps_the_rate_of_a_checkpoint(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    first = trainer(base, tmp_path, service, learning_rate="auto")
    assert first.step(batch(1))["lr"] == first.rate.value
    assert "on a service" in first.rate.reason
    earlier = trainer(base, tmp_path, service)
    earlier.step(batch(1))
    earlier.save(tmp_path / "1")
    resumed = trainer(base, tmp_path, service, learning_rate="auto")
    resumed.load(tmp_path / "1")
    assert resumed.step(batch(2))["lr"] == 0.05


@pytest.mark.parametrize("route", ["forward_backward", "optim_step", "save_weights"])
@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_request_that_is_sent_again_counts_once(
    base: Path, tmp_path: Path, service: PlayedTinker, route: str, fault: str
) -> None:
    steady = trainer(base, tmp_path, service)
    steady.step(batch())
    service.faults[route] = [fault]
    shaken = trainer(base, tmp_path, service)
    shaken.step(batch())
    assert service.faults[route] == []
    assert service.count("optim_step") == 2
    assert shaken.logprobs([[*PROMPT, *ANSWER]]) == steady.logprobs([[*PROMPT, *ANSWER]])


@pytest.mark.parametrize("route", ["forward_backward", "optim_step", "save_weights"])
@pytest.mark.parametrize("fault", ["failed", "forgotten"])
async def test_after_a_fault_the_step_is_taken_again_from_the_last_state(
    base: Path, tmp_path: Path, service: PlayedTinker, route: str, fault: str
) -> None:
    async with bench(base, tmp_path, publish="lora", **_settings(service)) as b:
        rollouts = await b.groups("t1", "t2")
        loop = b.loop()
        OPEN.append(b.trainer)
        await loop.resume()
        service.faults[route] = [fault]
        await loop.run(asyncio.Event(), once=True)
        assert await b.steps_of(rollouts) == {1}
        assert [*service.models.values()][-1].steps == 1
        version = await b.store.versions.live()
        assert (version.version, version.verified) == (1, True)
        step = await b.store.steps.of_version(1)
        assert step is not None
        assert (step.metrics["verify_deviations"], step.metrics["verified_by"]) == (0, "its name and its files")


def _settings(service: PlayedTinker) -> dict[str, Any]:
    return {"backend": True, "tinker": {"base_url": service.url}, "lora_rank": 4}


def test_what_the_service_refuses_is_one_clear_error(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    service.faults["forward_backward"] = ["refused"]
    with pytest.raises(ConfigError, match=r"^tinker: .* cannot take a step with the loss cispo: .*refused"):
        trainer(base, tmp_path, service).step(batch())


def test_a_fault_that_stays_ends_the_training(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t = trainer(base, tmp_path, service)
    service.faults["optim_step"] = ["failed"] * 3
    for _ in range(2):
        with pytest.raises(TrainingUnavailable, match="optim_step failed"):
            t.step(batch())
    with pytest.raises(ConfigError, match=r"optim_step failed.*\(3 times\)"):
        t.step(batch())


@pytest.mark.parametrize("answers", [[], ["403"], ["503"]])
def test_the_address_of_the_weights_is_told_to_nobody(
    base: Path, tmp_path: Path, service: PlayedTinker, caplog: pytest.LogCaptureFixture, answers: list[str]
) -> None:
    t = trainer(base, tmp_path, service)
    t.save(tmp_path / "0")
    service.faults["files"] = list(answers)
    with caplog.at_level(logging.INFO):
        if answers:
            with pytest.raises(TrainingUnavailable, match=f"answered {answers[0]}") as told:
                t.save_weights(tmp_path / "v1", merged=False)
            assert SIGNATURE not in str(told.value)
        else:
            t.save_weights(tmp_path / "v1", merged=False)
    ours = [record.getMessage() for record in caplog.records if record.name != "aiohttp.access"]  # the played server's
    assert SIGNATURE not in "".join(ours)


def test_a_refused_download_is_no_outage(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    t = trainer(base, tmp_path, service)
    t.save(tmp_path / "0")
    service.faults["files"] = ["403"] * 3
    for _ in range(2):
        with pytest.raises(TrainingUnavailable):
            t.save_weights(tmp_path / "v1", merged=False)
        t.load(tmp_path / "0")
    with pytest.raises(ConfigError, match=r"answered 403.*\(3 times\)"):
        t.save_weights(tmp_path / "v1", merged=False)


def test_a_wrong_key_is_one_clear_error(base: Path, tmp_path: Path, service: PlayedTinker) -> None:
    with pytest.raises(ConfigError, match="api_key must start with"):
        trainer(base, tmp_path, service, tinker={"base_url": service.url, "api_key": "wrong"}).save(tmp_path / "0")


@pytest.mark.parametrize(
    ("section", "settings", "named"),
    [
        ("trainer", {"loss_type": "sapo"}, "trainer.loss_type sapo (it can do cispo, grpo, dapo, bnpo, dr_grpo)"),
        ("trainer", {"importance_level": "sequence"}, "trainer.importance_level sequence"),
        ("trainer", {"kl_coef": 0.1}, "trainer.kl_coef 0.1"),
        ("trainer", {"entropy": {"coef": 0.1}}, "trainer.entropy"),
        ("trainer", {"teacher": {"base_url": "http://127.0.0.1:1/v1"}}, "teacher"),
        ("trainer", {"weights": "full"}, "trainer.weights full"),
        ("trainer", {"loss": "mine.py:loss"}, "trainer.loss mine.py:loss"),
        ("trainer", {"lora_alpha": 64}, "trainer.lora_alpha 64"),
        ("policy", {"publish": "merged"}, "policy.publish merged"),
        ("policy", {"adapters": {"writer": ["writer"]}}, "policy.adapters"),
    ],
)
def test_what_cannot_be_done_there_is_refused_by_name(section: str, settings: dict[str, Any], named: str) -> None:
    values: dict[str, Any] = {"trainer": {}, "policy": {}, "tinker": {"enabled": True}}
    values[section] |= settings
    with pytest.raises(ConfigError) as refused:
        check_backend(with_features(**values))
    assert named in refused.value.message
    assert refused.value.exit_code == 2


def test_other_methods_and_several_processes_are_refused() -> None:
    config = Config.model_validate({"tinker": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"--method dpo; several trainer processes"):
        check_backend(config, "dpo", launched=True)
    check_backend(Config(), "dpo", launched=True)


def test_without_the_client_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-proxy\[tinker\]'"):
        check_backend(Config.model_validate({"tinker": {"enabled": True}}))
