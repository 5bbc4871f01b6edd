"""Steps on a Tinker service: the exact datums, resume, faults, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from contract.raw import Upstream
from contract.system import played
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
Json = dict[str, Any]
PROMPT, ANSWER = (3, 4), (5, 6, 7)
PROTOBUF = "application/x-protobuf"


@dataclass
class Model:
    """The base model with an adapter that is one number, which moves the log-probabilities, and its gradient."""

    base: Any
    weight: float = 0.0
    gradient: float = 0.0
    steps: int = 0

    @torch.no_grad()
    def run(self, request: Any, data: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        """The log-probabilities of each datum's targets. Gradients are added unless it is a forward pass alone."""
        if not request.forward_only:
            self.gradient += sum(n * float(datum["advantages"].sum()) for n, datum in enumerate(data, 1))
        tokens, targets = ([torch.tensor(one[key]).long() for one in data] for key in ("tokens", "target_tokens"))
        scores = [self.base(input_ids=ids[None]).logits[0].float().log_softmax(-1) for ids in tokens]
        picked = [of_all.gather(1, ids[:, None])[:, 0] for of_all, ids in zip(scores, targets, strict=True)]
        return [(logprobs + self.weight / 1000).numpy() for logprobs in picked]

    def step(self, adam: dict[str, Any]) -> None:
        self.weight += adam["learning_rate"] * self.gradient
        self.gradient, self.steps = 0.0, self.steps + 1


class PlayedTinker(Upstream):
    """`got` has what was executed. `faults` maps a route to what happens to the next requests for it, in order.

    403, 503: an answer of this status. lost: it is executed, and the connection breaks. failed, refused: the future is,
    as the service's fault or the user's. forgotten: it is executed, and then no model is there any more.
    """

    def __init__(self, base: Path, adapter: Path) -> None:
        super().__init__()
        self.url, self.base = "", AutoModelForCausalLM.from_pretrained(base)
        config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
        self.adapter = {path.name: path.read_bytes() for path in adapter.glob("adapter_*")}
        self.models: dict[str, Model] = {}
        self.states: dict[str, Model] = {}
        self.got: list[tuple[str, Any]] = []
        self.faults: dict[str, list[str]] = {}
        self.keys: set[str | None] = set()
        self._futures: dict[str, Any] = {}

    async def _answer(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("X-API-Key"))
        route, content = request.path.removeprefix("/api/v1/"), await request.read()
        faults = self.faults.get("files" if route.startswith("files/") else route)
        fault = faults.pop(0) if faults else None
        if fault in ("403", "503"):
            return web.json_response({"error": "not now"}, status=int(fault))
        answer = self._route(route, content, fault)
        if fault == "lost" and request.transport is not None:
            request.transport.abort()
        if fault == "forgotten":
            self.models.clear()
        return answer

    def _route(self, route: str, content: bytes, fault: str | None) -> web.Response:
        if route.startswith("files/"):
            return web.Response(body=self.adapter[route.rpartition("/")[2]])
        if route.endswith("external_weights_urls"):
            urls = {file: f"{self.url}/api/v1/files/{file}?signature={SIGNATURE}" for file in self.adapter}
            return web.json_response({"urls": urls, "expires": "2100-01-01T00:00:00Z"})
        is_packed = route == "forward_backward"
        body: Any = pb.ForwardBackwardRequest.FromString(content) if is_packed else json.loads(content or "{}")
        if route == "retrieve_future":
            found = self._futures[body["request_id"]]
            is_json = not isinstance(found, bytes)
            return web.json_response(found) if is_json else web.Response(body=found, content_type=PROTOBUF)
        if route == "create_session":
            return web.json_response({"session_id": f"s{len(self._futures)}-{len(self.got)}"})
        if route == "get_info":
            return web.json_response({"model_id": body["model_id"], "model_data": {}})
        if route not in EXECUTED:
            return web.json_response({})
        sent = hashlib.sha256(route.encode() + content).hexdigest()  # its number is in it
        if sent not in self._futures:
            self._futures[sent] = self._execute(route, body, fault)
        return web.json_response({"request_id": sent})

    def _execute(self, route: str, body: Any, fault: str | None) -> Any:
        if fault in ("failed", "refused"):
            return {"error": f"{route} {fault}", "category": "user" if fault == "refused" else "server"}
        model_id = body.model_id if route == "forward_backward" else body.get("model_id")
        if route in ("create_model", "load_weights"):
            model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
            state = Model(self.base)
            if route == "load_weights":
                if body["path"] not in self.states:
                    return {"error": "no such state", "category": "user"}
                assert body["optimizer"]
                state = self.states[body["path"]]
            self.models[model_id] = replace(state)
            self.got.append((route, body))
            return {"model_id": model_id}
        if model_id not in self.models:
            return {"error": "the model is not there", "category": "server"}
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
        self.states |= {path: replace(model)} if route == "save_weights" else {}
        return {"path": path}

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
    content = np.concatenate(rows).astype(np.float32).tobytes()
    tensor = pb.BatchedTensor(data=content, offsets=sizes.tobytes(), dtype=pb.DTYPE_FLOAT32)
    record = pb.ArrayRecord(num_datums=len(rows), fields={"logprobs": tensor})
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    return bytes(output.SerializeToString())


@pytest.fixture(autouse=True, scope="module")
def left_open() -> None:
    """Nothing is looked for: the client's thread keeps its loop and connections for as long as the process runs."""


@pytest.fixture
def service(base: Path, tmp_path: Path) -> Iterator[PlayedTinker]:
    with played(one := PlayedTinker(base, tmp_path / "adapter")) as one.url:
        yield one


Make = Callable[..., TinkerTrainer]


@pytest.fixture
def make(base: Path, tmp_path: Path, service: PlayedTinker) -> Iterator[Make]:
    """Trainers on the service, as one process after another has them."""
    opened = []

    def trainer(**settings: Any) -> TinkerTrainer:
        policy = {"model": str(base), "publish": "lora", "directory": tmp_path}
        ours = {**on_a(service), "report_to": [], "learning_rate": 0.05, **settings}
        config = with_features(policy=policy, trainer=ours)
        opened.append(TinkerTrainer(config.trainer, config.policy))
        return opened[-1]

    yield trainer
    for one in opened:
        one.close()
    gc.collect()


def on_a(service: PlayedTinker) -> Json:
    return {"backend": True, "tinker": {"base_url": service.url}, "lora_rank": 4}


def sample(name: str, advantage: float, temperature: float = 1.0) -> Sample:
    mask = (0,) * len(PROMPT) + (1,) * len(ANSWER)
    given = tuple(-3.0 * m for m in mask), tuple(advantage * m for m in mask)
    return Sample(name, "t", PROMPT + ANSWER, mask, *given, tuple(temperature if m else 1.0 for m in mask))


def batch(step: int = 1, *samples: Sample) -> Batch:
    chosen = samples or (sample("a", 1.0), sample("b", -1.0))
    return Batch(step, chosen, tuple(s.rollout_id for s in chosen), compared=len(chosen))


# Steps ---------------------------------------------------------------------------------------------------------------


def test_the_service_gets_tokens_sampled_logprobs_and_weighted_advantages(make: Make, service: PlayedTinker) -> None:
    given = batch(1, sample("a", 1.0), sample("b", -2.0))
    metrics = make().step(given)
    body, data = dict(service.got)["forward_backward"]
    assert body.loss_fn == "cispo"
    assert dict(body.loss_fn_config) == {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
    assert [sorted(datum) for datum in data] == [["advantages", "logprobs", "target_tokens", "tokens"]] * 2
    found = [data[0][name].tolist() for name in ("tokens", "target_tokens", "logprobs")]
    assert found == [[3, 4, 5, 6], [4, 5, 6, 7], [0.0, -3.0, -3.0, -3.0]]
    sixth = np.array([0.0, *[1 / 6] * 3])  # two rollouts, three tokens
    np.testing.assert_allclose([datum["advantages"] for datum in data], [sixth, -2 * sixth], rtol=1e-6)
    adam = dict(service.got)["optim_step"]["adam_params"]
    assert (adam["learning_rate"], adam["grad_clip_norm"], adam["beta2"], adam["eps"]) == (0.05, 1.0, 0.999, 1e-8)
    assert (metrics["skipped"], metrics["trained_tokens"], metrics["lr"]) == (0.0, 6.0, 0.05)
    assert service.keys == {"tml-none"}
    again = make(tinker={"base_url": service.url, "reduction": "mean"}).step(given)
    _, data = dict(service.got)["forward_backward"]
    np.testing.assert_allclose(data[0]["advantages"], 8 * sixth, rtol=1e-6)  # times 4 tokens, 2 rows
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-5), "a mean on the service is undone"


def test_answers_at_other_temperatures_are_left_out_by_name(make: Make, service: PlayedTinker) -> None:
    t, hot = make(), sample("hot", -1.0, 1.5)
    assert t.step(batch(1, sample("a", 1.0), hot))["trained_tokens"] == 3
    assert "hot" in str(t.left_out_because)
    assert t.step(batch(2, hot))["skipped"] == 1
    assert t.skipped_because is not None
    assert service.count("optim_step") == 1


def test_a_wrong_sampler_skips_the_step(make: Make, service: PlayedTinker) -> None:
    t, n = make(), len(PROMPT + ANSWER)
    given = [replace(sample(str(i), (-1.0) ** i), versions=(2,), logprobs=(-9.0,) * n) for i in range(90)]
    wrong = t.step(replace(batch(1, *given), version=2))
    assert (wrong["skipped"], wrong["trained_tokens"], service.count("optim_step")) == (1, 270, 0)
    assert wrong["sampler_difference"] > 0.3 and t.skipped_because == t.warnings["sampler"]
    assert t.step(replace(batch(2, *given), version=3))["skipped"] == 0, "of an earlier version"
    assert t.warnings == {}


# Resumed -------------------------------------------------------------------------------------------------------------

ROWS = [[*PROMPT, *ANSWER]]


def test_a_killed_trainer_goes_on_exactly_from_its_last_checkpoint_also_at_its_rate(make: Make, tmp_path: Path) -> None:
    steady, killed, resumed = make(), make(), make(learning_rate="auto")
    assert "on a service" in resumed.rate.reason and resumed.rate.value != 0.05
    for step in (1, 2):
        steady.step(batch(step))
    killed.step(batch(1))
    killed.save(tmp_path / "1")
    killed.step(batch(2))  # sent, applied, and not committed
    assert resumed.load(tmp_path / "1") == 1
    assert resumed.step(batch(2))["lr"] == 0.05
    assert resumed.logprobs(ROWS) == steady.logprobs(ROWS) != make().logprobs(ROWS)


@pytest.mark.parametrize("route", ["forward_backward", "optim_step", "save_weights"])
@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_request_that_is_sent_again_counts_once(make: Make, service: PlayedTinker, route: str, fault: str) -> None:
    steady, shaken = make(), make()
    steady.step(batch())
    service.faults[route] = [fault]
    shaken.step(batch())
    assert service.faults[route] == []
    assert service.count("optim_step") == 2
    assert shaken.logprobs(ROWS) == steady.logprobs(ROWS)


@pytest.mark.parametrize("route", ["forward_backward", "optim_step", "save_weights"])
@pytest.mark.parametrize("fault", ["failed", "forgotten"])
async def test_after_a_fault_the_step_is_taken_again_from_the_last_state(
    base: Path, tmp_path: Path, service: PlayedTinker, route: str, fault: str
) -> None:
    async with bench(base, tmp_path, publish="lora", **on_a(service)) as b:
        rollouts = await b.groups("t1", "t2")
        loop = b.loop()
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
        b.trainer.close()


# What does not work --------------------------------------------------------------------------------------------------


def test_a_fault_that_stays_or_a_refusal_is_one_clear_error(make: Make, service: PlayedTinker, tmp_path: Path) -> None:
    t = make()
    service.faults["optim_step"] = ["failed"] * 3
    for _ in range(2):
        with pytest.raises(TrainingUnavailable, match="optim_step failed"):
            t.step(batch())
    with pytest.raises(ConfigError, match=r"optim_step failed.*\(3 times\)"):
        t.step(batch())
    service.faults["forward_backward"] = ["refused"]
    with pytest.raises(ConfigError, match=r"^tinker: .* cannot take a step with the loss cispo: .*refused"):
        make().step(batch())
    with pytest.raises(ConfigError, match="api_key must start with"):
        make(tinker={"base_url": service.url, "api_key": "wrong"}).save(tmp_path / "0")


def test_a_refused_download_is_no_outage_and_the_address_of_the_weights_is_told_to_nobody(
    make: Make, tmp_path: Path, service: PlayedTinker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    t, said = make(), list[str]()
    t.save(tmp_path / "0")
    t.save_weights(tmp_path / "v1", merged=False)
    # An outage, the second, does not count.
    for status, error in zip(("403", "503", "403", "403"), [TrainingUnavailable] * 3 + [ConfigError], strict=True):
        service.faults["files"] = [status]
        with pytest.raises(error, match=f"answered with HTTP {status}") as told:
            t.save_weights(tmp_path / "v2", merged=False)
        said.append(str(told.value))
        t.load(tmp_path / "0")
    assert said[-1].endswith("(3 times)")
    said += [one.getMessage() for one in caplog.records if one.name != "aiohttp.access"]  # the played server's
    assert SIGNATURE not in "".join(said)


@pytest.mark.parametrize(
    ("trainer", "policy", "named"),
    [
        (
            {"loss_type": "sapo", "importance_level": "sequence", "kl_coef": 0.1, "weights": "full", "lora_alpha": 64},
            {"publish": "merged"},
            "trainer.loss_type sapo (it supports cispo, grpo, dapo, bnpo, dr_grpo); policy.publish merged; "
            "trainer.importance_level sequence; trainer.kl_coef 0.1; trainer.weights full; trainer.lora_alpha 64",
        ),
        (
            {"loss": "mine.py:loss", "entropy": {"coef": 0.1}, "teacher": {"base_url": "http://127.0.0.1:1/v1"}},
            {"adapters": {"writer": ["writer"]}},
            "trainer.entropy; teacher; policy.adapters; trainer.loss mine.py:loss",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_there_is_refused_by_name(trainer: Json, policy: Json, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"the service does not support {named}. ")):
        check_backend(with_features(trainer=trainer, policy=policy, tinker={"enabled": True}))


def test_other_methods_several_processes_and_no_client_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"tinker": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"--method dpo; several trainer processes"):
        check_backend(config, "dpo", launched=True)
    check_backend(Config(), "dpo", launched=True)
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-proxy\[tinker\]'"):
        check_backend(config)
