"""A real vLLM as a teacher, and as a judge: a model that writes at random."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from contract.real import System
from lightning_proxy.features.judge.model import pattern_of
from lightning_proxy.features.judge.rewarders import order_pattern
from lightning_proxy.serving.vllm import VllmServer, operator_session
from support.models import LETTERS
from support.sections import PolicyConfig, TrainerConfig
from support.twice import post

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(600)]


@pytest.mark.long
async def test_a_real_vllm_scores_rows_as_the_same_weights_do_here(
    merged: System, speller: Path, tmp_path: Path
) -> None:
    from lightning_proxy.features.teacher.config import TeacherConfig  # these import torch
    from lightning_proxy.features.teacher.teacher import Teacher
    from lightning_proxy.trainer.step.trainer import LightningTrainer
    from lightning_proxy.trainer.types import Batch, Sample

    merged.promote(0)
    url = f"http://127.0.0.1:{merged.vllm_port}/v1"
    config = TrainerConfig.model_validate({"teacher": {"base_url": url}, "report_to": [], "dtype": "float32"})
    learner = LightningTrainer(config, PolicyConfig(model=str(speller), directory=tmp_path))
    letters = learner.tokenizer("".join(LETTERS), add_special_tokens=False)["input_ids"]
    rows = [tuple(random.Random(i).choices(letters, k=14)) for i in range(8)]
    mask, zeros, ones = (0,) * 6 + (1,) * 8, (0.0,) * 14, (1.0,) * 14
    batch = Batch(1, tuple(Sample("r", "t", row, mask, zeros, zeros, ones, ("c",)) for row in rows), ("r",))
    async with operator_session() as session:
        teacher = Teacher(config.section(TeacherConfig), VllmServer(session, url, {}), learner.tokenizer)
        guided = await teacher.guided(batch)
    for sample, own in zip(guided.samples, learner.logprobs(rows), strict=True):
        assert sample.guidance is not None
        assert sample.guidance.logprobs[6:] == pytest.approx(own[6:], abs=1e-3)


def test_any_model_ends_its_order_and_names_as_many_attempts_as_there_are(merged: System) -> None:
    body = {
        "model": "speller", "messages": [{"role": "user", "content": "order"}], "max_tokens": 900,
        "structured_outputs": {"regex": pattern_of("order", order_pattern("ABC"))}, "temperature": 1, "n": 4,
    }  # fmt: skip
    status, answer = post(f"http://127.0.0.1:{merged.vllm_port}/v1/chat/completions", body)
    assert status == 200, answer
    for choice in json.loads(answer)["choices"]:
        found = json.loads(choice["message"]["content"])
        assert found["reason"]
        assert len([letter for tie in found["order"] for letter in tie]) == 3
