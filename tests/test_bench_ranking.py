"""The judge of the benchmark orders sums by what they are worth, as far as it is told to agree with that."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_proxy.proxy.config.rollouts import RewardsConfig
from lightning_proxy.proxy.rewarders.config import RewarderConfig
from lightning_proxy.proxy.rewarders.model import JudgeModel
from lightning_proxy.proxy.rewarders.rank import Rank
from lightning_proxy.proxy.rewarders.rubric import Rubric
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from ranking_judge import CRITERIA, alike, answer, judged


class Scripted(JudgeModel):
    """Asks the benchmark's judge without HTTP."""

    def __init__(self) -> None:
        self._config = RewarderConfig(kind="rank", model="openai/script")
        self.clean = str

    async def structured(self, system: str, text: str, schema: Any, pattern: str, read: Any, about: Any) -> Any:
        return read(answer(system, text, 1.0))


def sum_of(n: int, said: str) -> dict[str, Any]:
    request = {"messages": [{"role": "user", "content": "What is 3+4? Answer with just the number."}]}
    response = {"choices": [{"message": {"role": "assistant", "content": said}}]}
    call = {"call_id": "c", "status": "ok", "superseded_by": None, "request": request, "response": response}
    return {"rollout_id": f"r{n}", "calls": [call], "rewards": []}


async def test_a_judge_that_agrees_ranks_by_the_agents_own_reward() -> None:
    rewarder = Rank("order", RewarderConfig(kind="rank", model="openai/script"), Scripted())
    given = await rewarder.reward([sum_of(n, said) for n, said in enumerate(["7", "none", "It is 7", "6", "2"])])
    assert [one.scores[0].value for one in given] == [1.0, 0.0, 0.25, 0.75, 0.5]


async def test_a_judge_that_agrees_answers_a_rubric(tmp_path: Path) -> None:
    file = tmp_path / "rubric.yaml"
    file.write_text(
        yaml.safe_dump({"criteria": [{"name": f"c{i}", "question": one} for i, one in enumerate(CRITERIA)]})
    )
    config = RewarderConfig(kind="rubric", model="openai/script", file=file)
    rewarder = Rubric("rubric", config, Scripted(), RewardsConfig())
    given = [await rewarder.scores(sum_of(0, text)) for text in ("7", "It is 7", "8", "none")]
    assert [one.value for (one,) in given] == [1.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("wanted", [0.6, 0.8, 0.95])
def test_its_agreement_is_as_it_was_told(wanted: float) -> None:
    drawn = random.Random(1)
    truths = [[drawn.choice([0.0, 0.1, 0.25, 0.4, 0.5, 1.0]) for _ in range(8)] for _ in range(50)]
    found = [alike(truth, judged(truth, wanted, str(n))) for n, truth in enumerate(truths)]
    assert abs(sum(found) / len(found) - wanted) < 0.05
