"""A teacher: what it is asked, what its answers teach, and which teachers are refused."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.features.teacher.config import TeacherConfig
from lightning_proxy.features.teacher.teacher import Teacher
from lightning_proxy.features.tune.data import STORE_FILE
from lightning_proxy.features.tune.offline import train_offline
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.serving.vllm import VllmServer, operator_session
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.plugins import Offline, Run
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample, Sampling
from lightning_proxy.trainer.waiting import GuideError
from support.models import save_small_model
from support.sections import PolicyConfig, TrainerConfig, with_features

PROMPT = (0, 5, 6)


class TeacherServer:
    """A vLLM as a teacher needs it, over transformers. `wrong`: what it does instead, if anything."""

    def __init__(self, directory: Path, longest: int = 64) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory)
        self.longest = longest
        self.rows: list[tuple[int, ...]] = []
        self.wrong: Any = None
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self.handle)

    async def handle(self, request: web.Request) -> web.Response:
        if self.wrong == "away":
            return web.json_response({"error": {"message": "starting"}}, status=503)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "large", "parent": None, "max_model_len": self.longest}]})
        body = json.loads(await request.text())
        assert request.headers["authorization"] == "Bearer secret" and body["model"] == "large"
        if isinstance(body["prompt"], str):
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return web.json_response({"choices": [{"prompt_token_ids": ids + [3] * (self.wrong == "tokens")}]})
        row = tuple(body["prompt"])
        assert len(row) + body["max_tokens"] <= self.longest
        self.rows.append(row)
        told = [{str(token): {"logprob": value}} for token, value in zip(row[1:], self.scores(row), strict=True)]
        return web.json_response({"choices": [{"prompt_logprobs": [None, *told]}]})

    @torch.no_grad()
    def scores(self, row: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([row])
        found = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return list(found.gather(1, ids[0, 1:, None])[:, 0].tolist())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TeacherServer]:
    played = TeacherServer(save_small_model(tmp_path / "teacher", seed=1), longest=9)
    async with TestServer(played.app) as running:
        played.url = str(running.make_url("/v1"))
        yield played


@asynccontextmanager
async def asked(played: TeacherServer, **changed: Any) -> AsyncIterator[Teacher]:
    given = {"base_url": played.url, "api_key": "secret", **changed}
    config = with_features(teacher=given).section(TeacherConfig)
    async with operator_session() as session:
        server = VllmServer(session, str(config.base_url), config.credentials)
        yield Teacher(config, server, played.tokenizer)


def row(answer: tuple[int, ...], logprobs: tuple[float, ...] = (), **changed: Any) -> Sample:
    n, k = len(answer), len(PROMPT)
    captured = (0.0,) * k + (logprobs or (-1.0,) * n)
    zeros, ones = (0.0,) * (k + n), (1.0,) * (k + n)
    return replace(Sample("r", "t", (*PROMPT, *answer), (0,) * k + (1,) * n, captured, zeros, ones, ("c",)), **changed)


async def test_what_a_teacher_says_of_an_answer_is_guidance(server: TeacherServer) -> None:
    async with asked(server, weight=0.5) as teacher:
        batch = await teacher.guided(Batch(1, (row((7, 8)), row((7, 8)), row((9,))), ("r",)))
        for sample in batch.samples:
            guidance = sample.guidance
            assert guidance is not None and guidance.weight == 0.5
            assert guidance.logprobs[3:] == pytest.approx(server.scores(sample.token_ids)[2:], abs=1e-5)
            assert all(map(math.isnan, guidance.logprobs[:3]))
        assert sorted(server.rows) == [(0, 5, 6, 7, 8), (0, 5, 6, 9)]  # equal rows are asked for once
        assert (batch.metrics["calls_taught"], batch.metrics["teacher_tokens"]) == (3, 11)


async def test_a_teacher_is_not_asked_about_what_it_cannot_say(server: TeacherServer) -> None:
    warm = row((7, 8), temperatures=(1.0,) * 3 + (0.7,) * 2)
    shaped = row((7, 8), shaped=((3, 5, Sampling(top_p=0.5)),))
    long = row((7, 8, 9, 10, 11, 12, 13))  # the teacher's longest row has 8 tokens, and samples one
    beyond = replace(row((7, 8)), token_ids=(*range(2, 11), 7), **{
        name: (value,) * 9 + (value,) for name, value in (("logprobs", 0.0), ("advantages", 0.0), ("temperatures", 1.0))
    }, mask=(0,) * 9 + (1,))  # fmt: skip
    async with asked(server) as teacher:
        batch = await teacher.guided(Batch(1, (warm, shaped, long, beyond), ("r",)))
        said = [
            [math.isnan(value) for value in sample.guidance.logprobs] for sample in batch.samples if sample.guidance
        ]
        assert said == [[True] * 5, [True] * 5, [True] * 3 + [False] * 5 + [True] * 2, [True] * 10]
        counts = [batch.metrics[name] for name in ("calls_taught", "calls_not_plain", "calls_beyond_teacher")]
        assert counts == [1, 2, 1]
        assert (0, 5, 6, 7, 8) not in server.rows


async def test_a_teacher_with_other_tokens_is_refused_and_one_that_is_away_is_waited_for(server: TeacherServer) -> None:
    async with asked(server) as teacher:
        server.wrong = "away"
        for ask in (teacher.check, lambda: teacher.guided(Batch(1, (row((7,)),), ()))):
            with pytest.raises(GuideError, match=r"teacher: vLLM answered 503 to GET /v1/models"):
                await ask()
        server.wrong = "tokens"
        with pytest.raises(ConfigError, match=r"large at http.*has other tokens than policy.model"):
            await teacher.check()
        server.wrong = None
        await teacher.check()
        server.wrong = "away"
        with pytest.raises(GuideError, match="answered 503 to POST /v1/completions"):
            await teacher.guided(Batch(1, (row((7,)),), ()))


async def test_the_policy_comes_nearer_to_its_teacher_without_any_reward(server: TeacherServer, tmp_path: Path) -> None:
    policy = PolicyConfig(model=str(save_small_model(tmp_path / "base")), directory=tmp_path)
    settings = {"learning_rate": 0.02, "report_to": [], "dtype": "float32", "reward_weights": {"reward": 0}}
    learner = LightningTrainer(TrainerConfig.model_validate({**settings, "teacher": {"base_url": server.url}}), policy)
    torch.manual_seed(0)
    found = []
    async with asked(server) as teacher:
        for step in range(20):
            ids = torch.tensor([PROMPT] * 32)
            for _ in range(3):
                with torch.no_grad():
                    chances = learner.policy_model(input_ids=ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, chances.multinomial(1)], 1)
            rows = [tuple(one) for one in ids.tolist()]
            scores = learner.logprobs(rows)
            samples = tuple(row(one[3:], tuple(said[3:])) for one, said in zip(rows, scores, strict=True))
            metrics = learner.step(await teacher.guided(Batch(step, samples, ())))
            found.append(metrics["guide_kl"])
    assert metrics["guided_share"] == 1.0
    assert sum(found[-3:]) / 3 < found[0] / 2


async def test_recorded_rollouts_of_equal_rewards_are_learned_from_offline(
    server: TeacherServer, tmp_path: Path
) -> None:
    source = StoreConfig(url=f"sqlite:///{tmp_path}/recorded.db")
    async with opened(source) as database, Recorder(store := Store(database), merged=False) as recorder:
        for i in range(4):
            name, request = f"r{i}", {"messages": [{"role": "user", "content": "w5 w6"}]}
            who = RolloutName(name, "t")
            await recorder.start(CallStart(name, who, "chat/completions", "policy", 0, request, time.time()))
            choice = Choice(0, (7, 8 + i), (-3.0, -3.0), "stop")
            await recorder.end(CallEnd(name, name, "ok", {}, 200, PROMPT, (choice,)))
            await store.rewards.post([Reward(name, 0.0)])
    config = Config.model_validate({
        "policy": {"model": str(save_small_model(tmp_path / "base")), "directory": tmp_path, "publish": "lora"},
        "trainer": {"group_size": 4, "dtype": "float32", "report_to": []}, "store": source.model_dump(),
        "teacher": {"base_url": server.url, "api_key": "secret"},
    })  # fmt: skip
    server.wrong = "tokens"
    with pytest.raises(ConfigError, match="other tokens"):
        await train_offline(config, Run(), Offline(None, tmp_path / "run"), asyncio.Event())
    server.wrong = None
    await train_offline(config, Run(), Offline(None, tmp_path / "run"), asyncio.Event())
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/run/{STORE_FILE}")) as database:
        last = await Store(database).steps.last()
    assert last is not None
    told = {name: last.metrics[name] for name in ("rollouts_trained", "calls_taught", "guided_share")}
    assert told == {"rollouts_trained": 4, "calls_taught": 4, "guided_share": 1} and last.metrics["guide_s"] > 0


def test_what_a_teacher_needs_is_said_before_it_is_asked() -> None:
    with pytest.raises(ValidationError, match="base_url of a vLLM must have a path"):
        TrainerConfig.model_validate({"teacher": {"base_url": "http://127.0.0.1:1"}})
    with pytest.raises(ValidationError, match="name at least one reward"):
        TrainerConfig.model_validate({"reward_weights": {"reward": 0}})
    with pytest.raises(ValidationError, match="name at least one reward"):  # nothing would ever be offered
        TrainerConfig.model_validate({"reward_weights": {}, "teacher": {"base_url": "http://h/v1"}})
    with pytest.raises(ValidationError, match="a teacher needs a base_url"):
        TrainerConfig.model_validate({"teacher": {"model": "large"}})
    config = Config.model_validate({"teacher": {"base_url": "http://h/v1", "api_key": "k1"}})
    keys = config.keys()
    assert keys == ["k1"] and "k1" not in config.model_dump_json()
