"""A real vLLM as a teacher, that the policy comes nearer to, and as a judge: a model that writes at random."""

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
async def test_a_policy_that_was_moved_away_comes_back_to_its_teacher(
    merged: System, speller: Path, tmp_path: Path
) -> None:
    import torch

    from lightning_proxy.features.teacher.config import TeacherConfig
    from lightning_proxy.features.teacher.teacher import Teacher
    from lightning_proxy.trainer.step.trainer import LightningTrainer
    from lightning_proxy.trainer.types import Batch, Sample

    merged.promote(0)
    config = TrainerConfig.model_validate({
        "teacher": {"base_url": f"http://127.0.0.1:{merged.vllm_port}/v1"}, "reward_weights": {"reward": 0},
        "learning_rate": 2e-3, "report_to": [], "dtype": "float32",
    })  # fmt: skip
    given = config.section(TeacherConfig)
    learner = LightningTrainer(config, PolicyConfig(model=str(speller), directory=tmp_path))
    letters = learner.tokenizer(list(LETTERS), add_special_tokens=False)["input_ids"]
    prompts = [tuple(token for (token,) in random.Random(i).sample(letters, 6)) for i in range(8)]

    @torch.no_grad()
    def batch(step: int) -> Batch:
        """What the policy answers now: four answers of eight tokens to each prompt."""
        ids = torch.tensor(prompts * 4)
        for _ in range(8):
            chances = learner.policy_model(input_ids=ids).logits[:, -1].float().softmax(-1)
            ids = torch.cat([ids, chances.multinomial(1)], 1)
        rows = [tuple(row) for row in ids.tolist()]
        mask, zeros, ones = (0,) * 6 + (1,) * 8, (0.0,) * 14, (1.0,) * 14
        captured = [(*zeros[:6], *said[6:]) for said in learner.logprobs(rows)]
        samples = [Sample("r", "t", r, mask, c, zeros, ones, ("c",)) for r, c in zip(rows, captured, strict=True)]
        return Batch(step, tuple(samples), ("r",))

    torch.manual_seed(0)
    async with operator_session() as session:
        teacher = Teacher(given, VllmServer(session, str(given.base_url), {}), learner.tokenizer)
        first = await teacher.guided(batch(0))
        own = learner.logprobs([sample.token_ids for sample in first.samples])  # the adapter adds nothing yet
        for sample, said in zip(first.samples, own, strict=True):
            assert sample.guidance.logprobs[6:] == pytest.approx(said[6:], abs=1e-3)
        with torch.no_grad():
            for name, parameter in learner.model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        gaps = [learner.step(await teacher.guided(batch(step)))["guide_kl"] for step in range(1, 13)]
    assert gaps[0] > 0.2 and sum(gaps[-3:]) / 3 < gaps[0] / 2, gaps


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
