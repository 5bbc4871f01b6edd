"""A teacher: what it is asked, and which teachers are refused.

`tests/end_to_end/test_teacher.py` asks a real vLLM, `tests/reference/` has the gradients of what is learned.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import ValidationError
from transformers import AutoTokenizer

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.features.teacher.config import TeacherConfig
from lightning_proxy.features.teacher.teacher import Teacher
from lightning_proxy.features.tune.data import STORE_FILE
from lightning_proxy.features.tune.offline import train_offline
from lightning_proxy.serving.vllm import VllmServer, operator_session
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.plugins import Offline, Run
from lightning_proxy.trainer.types import Batch, Sample, Sampling
from lightning_proxy.trainer.waiting import GuideError
from support.models import save_small_model
from support.rewarded import record
from support.sections import TrainerConfig, with_features

PROMPT, LONGEST = (0, 5, 6), 9


class TeacherServer:
    """A vLLM as a teacher needs it. `wrong`: what it does instead, if anything."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.rows: list[tuple[int, ...]] = []
        self.wrong: Any = None
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self.handle)

    async def handle(self, request: web.Request) -> web.Response:
        if self.wrong == "away":
            return web.json_response({"error": {"message": "starting"}}, status=503)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "large", "parent": None, "max_model_len": LONGEST}]})
        body = json.loads(await request.text())
        assert request.headers["authorization"] == "Bearer secret" and body["model"] == "large"
        if isinstance(body["prompt"], str):
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return web.json_response({"choices": [{"prompt_token_ids": ids + [3] * (self.wrong == "tokens")}]})
        row = tuple(body["prompt"])
        assert len(row) + body["max_tokens"] <= LONGEST
        self.rows.append(row)
        told = [{str(token): {"logprob": value}} for token, value in zip(row[1:], self.scores(row), strict=True)]
        return web.json_response({"choices": [{"prompt_logprobs": [None, *told]}]})

    @staticmethod
    def scores(row: tuple[int, ...]) -> list[float]:
        return [-0.1 * token for token in row[1:]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TeacherServer]:
    played = TeacherServer(save_small_model(tmp_path / "teacher"))
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


def row(answer: tuple[int, ...], prompt: tuple[int, ...] = PROMPT, **changed: Any) -> Sample:
    n, k = len(answer), len(prompt)
    captured, mask, zeros, ones = (0.0,) * k + (-1.0,) * n, (0,) * k + (1,) * n, (0.0,) * (k + n), (1.0,) * (k + n)
    return replace(Sample("r", "t", (*prompt, *answer), mask, captured, zeros, ones, ("c",)), **changed)


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
    beyond = row((7,), prompt=tuple(range(2, 11)))
    async with asked(server) as teacher:
        batch = await teacher.guided(Batch(1, (warm, shaped, long, beyond), ("r",)))
        said = [[not math.isnan(value) for value in one.guidance.logprobs] for one in batch.samples if one.guidance]
        assert said == [[False] * 5, [False] * 5, [False] * 3 + [True] * 5 + [False] * 2, [False] * 10]
        counts = [batch.metrics[name] for name in ("calls_taught", "calls_not_plain", "calls_beyond_teacher")]
        assert counts == [1, 2, 1]
        assert (0, 5, 6, 7, 8) not in server.rows


async def test_a_teacher_with_other_tokens_is_refused_and_one_that_is_away_is_waited_for(server: TeacherServer) -> None:
    async with asked(server) as teacher:
        server.wrong = "away"
        for ask in (teacher.check, lambda: teacher.guided(Batch(1, (row((7,)),), ()))):
            with pytest.raises(GuideError, match=r"teacher: vLLM answered GET /v1/models with HTTP 503"):
                await ask()
        server.wrong = "tokens"
        with pytest.raises(ConfigError, match=r"large at http.*has a different tokenizer from policy.model"):
            await teacher.check()
        server.wrong = None
        await teacher.check()
        server.wrong = "away"
        with pytest.raises(GuideError, match="answered POST /v1/completions with HTTP 503"):
            await teacher.guided(Batch(1, (row((7,)),), ()))


async def test_recorded_rollouts_of_equal_rewards_are_learned_from_offline(
    server: TeacherServer, tmp_path: Path
) -> None:
    source = StoreConfig(url=f"sqlite:///{tmp_path}/recorded.db")
    async with opened(source) as database:
        for i in range(4):
            ids = {"hi ": PROMPT, str(i): (7, 8 + i)}
            await record(Store(database), f"r{i}", [str(i)], 0.0, ids.__getitem__)
    config = Config.model_validate({
        "policy": {"model": str(save_small_model(tmp_path / "base")), "directory": tmp_path, "publish": "lora"},
        "trainer": {"group_size": 4, "dtype": "float32", "report_to": []}, "store": source.model_dump(),
        "teacher": {"base_url": server.url, "api_key": "secret"},
    })  # fmt: skip
    server.wrong = "tokens"
    with pytest.raises(ConfigError, match="a different tokenizer"):
        await train_offline(config, Run(), Offline(None, tmp_path / "run"), asyncio.Event())
    server.wrong = None
    await train_offline(config, Run(), Offline(None, tmp_path / "run"), asyncio.Event())
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/run/{STORE_FILE}")) as database:
        last = await Store(database).steps.last()
    assert last is not None
    told = {name: last.metrics[name] for name in ("rollouts_trained", "calls_taught", "guided_share")}
    assert told == {"rollouts_trained": 4, "calls_taught": 4, "guided_share": 1} and last.metrics["guide_s"] > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"teacher": {"base_url": "http://127.0.0.1:1"}}, "base_url of a vLLM server must have a path"),
        # Nothing would ever be offered.
        ({"reward_weights": {}, "teacher": {"base_url": "http://h/v1"}}, "name at least one reward"),
        ({"teacher": {"model": "large"}}, "a teacher needs a base_url"),
    ],
)
def test_what_a_teacher_needs_is_said_before_it_is_asked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainerConfig.model_validate(settings)


def test_a_teachers_key_is_shown_nowhere() -> None:
    config = Config.model_validate({"teacher": {"base_url": "http://h/v1", "api_key": "k1"}})
    assert config.keys() == ["k1"] and "k1" not in config.model_dump_json()
