"""A two-call yes/no task that tempts a policy into one word: what learning rate and entropy bonus do to it.

A tiny random model guesses the answer to one of eight questions, then is shown its guess and answers again. A right
answer is worth 1, a wrong yes or no 0.3, any other word 0. Saying one word to all questions is worth 0.65. Steps are
the trainer's own, on 8 groups of 8 as the settings say; a model of this size needs higher rates than a real one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from results_page import Page, option

from lightning_proxy.proxy.config.policy import PolicyConfig
from lightning_proxy.proxy.config.trainer import TrainerConfig
from lightning_proxy.trainer.credit.baselines import group_baselines
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.small_model import save_small_model

YES, NO, CHECK, QUESTIONS = 2, 3, 4, range(8, 16)
GROUP, STEPS, SEEDS = 8, 120, 3
WORD = {question: YES if question % 4 < 2 else NO for question in QUESTIONS}
CASES: dict[str, dict[str, Any]] = {
    f"rate {rate:g}, {name}": {"learning_rate": rate, "entropy": entropy}
    for rate in (3e-3, 1e-2)
    for name, entropy in {
        "no bonus": {},
        "coef 0.01": {"coef": 0.01},
        "coef 0.03": {"coef": 0.03},
        "coef 0.1": {"coef": 0.1},
        "target 0.5": {"target": 0.5},
    }.items()
}


def sampled(trainer: LightningTrainer, prompts: list[list[int]]) -> tuple[list[int], list[float]]:
    """One token for each prompt, and its log-probability."""
    with torch.no_grad():
        logp = trainer.policy_model(input_ids=torch.tensor(prompts)).logits[:, -1].float().log_softmax(-1)
    tokens = torch.multinomial(logp.exp(), 1)
    return tokens[:, 0].tolist(), logp.gather(1, tokens)[:, 0].tolist()


def groups(trainer: LightningTrainer, step: int) -> Iterator[tuple[list[Sample], list[float]]]:
    """Each group's rows (none if all rewards are equal) and rewards."""
    asked = [question for question in QUESTIONS for _ in range(GROUP)]
    guesses, first = sampled(trainer, [[0, question] for question in asked])
    answers, second = sampled(trainer, [[0, q, guess, CHECK] for q, guess in zip(asked, guesses, strict=True)])
    rewards = [1.0 if a == WORD[q] else 0.3 if a in (YES, NO) else 0.0 for q, a in zip(asked, answers, strict=True)]
    for start in range(0, len(asked), GROUP):
        own, rows = range(start, start + GROUP), []
        baselines = group_baselines("grpo", [rewards[i] for i in own])
        for i, baseline in zip(own, baselines or (), strict=False):
            a = baseline.advantage(rewards[i])
            ids, mask = (0, asked[i], guesses[i], CHECK, answers[i]), (0, 0, 1, 0, 1)
            logps, advantages = (0.0, 0.0, first[i], 0.0, second[i]), (0.0, 0.0, a, 0.0, a)
            rows.append(Sample(f"{step}-{i}", str(asked[i]), ids, mask, logps, advantages, (1.0,) * 5))
        yield rows, [rewards[i] for i in own]


def run(directory: Path, seed: int, settings: dict[str, Any]) -> Iterator[dict[str, float]]:
    """The reward, the share of equal groups and the entropy of each batch."""
    model = save_small_model(directory / "model", seed)
    config = TrainerConfig.model_validate({"report_to": [], "dtype": "float32", "threads": 1, **settings})
    trainer = LightningTrainer(config, PolicyConfig(model=str(model), directory=directory))
    torch.manual_seed(seed)
    entropy = float("nan")
    for step in range(STEPS):
        found = list(groups(trainer, step))
        rows = [row for own, _ in found for row in own]
        if rows:
            entropy = trainer.step(Batch(step, tuple(rows), (), compared=GROUP * len(found)))["entropy"]
        rewards = [reward for _, own in found for reward in own]
        equal = fmean(not own for own, _ in found)
        yield {"reward": fmean(rewards), "equal": equal, "entropy": entropy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    option(parser, "entropy")
    options = parser.parse_args()
    page = Page("Learning rates and entropy bonuses on a task that tempts into one word")
    about = f"Means of the last 10 of {STEPS} batches, seeds {list(range(SEEDS))}:"
    page.table(about, ("settings", "reward, by seed", "groups with equal rewards", "entropy"), rows())
    page.save(options.page)


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each case."""
    for name, settings in CASES.items():
        ends = []
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as directory:
                ends.append(list(run(Path(directory), seed, settings))[-10:])
        rewards = ", ".join(f"{fmean(one['reward'] for one in end):.2f}" for end in ends)
        equal, entropy = (fmean(one[key] for end in ends for one in end) for key in ("equal", "entropy"))
        yield name, rewards, f"{equal:.0%}", f"{entropy:.2f}"


if __name__ == "__main__":
    main()
