"""A two-call yes/no task that tempts a policy into one word: what rate, entropy, KL, baseline and group size do to it.

A tiny random model guesses the answer to one of eight questions, then is shown its guess and answers again. A right
answer is worth 1, a wrong yes or no 0.3, any other word 0. Saying one word to all questions is worth 0.65. Steps are
the trainer's own, on a group for each question; a model of this size needs higher rates than a real one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

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
BATCHES, WINDOW, SEEDS = 300, 20, 5
WORD = {question: YES if question % 4 < 2 else NO for question in QUESTIONS}
SETTINGS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "entropy.coef 0.05": {"entropy": {"coef": 0.05}},
    "entropy.target 1": {"entropy": {"target": 1.0}},
    "kl_coef 0.1": {"kl_coef": 0.1},
    "kl_coef 0.3": {"kl_coef": 0.3},
    "baseline dr_grpo": {"baseline": "dr_grpo"},
    "dr_grpo, kl_coef 0.1": {"baseline": "dr_grpo", "kl_coef": 0.1},
    "group_size 16": {"group_size": 16},
}
RATES = (3e-3, 1e-2)


class End(NamedTuple):
    """The best mean reward of 20 batches in a row, that of the last 20, and their groups of equal rewards, entropy."""

    best: float
    last: float
    equal: float
    entropy: float


def sampled(trainer: LightningTrainer, prompts: list[list[int]]) -> tuple[list[int], list[float]]:
    """One token for each prompt, and its log-probability."""
    with torch.no_grad():
        logp = trainer.policy_model(input_ids=torch.tensor(prompts)).logits[:, -1].float().log_softmax(-1)
    tokens = torch.multinomial(logp.exp(), 1)
    return tokens[:, 0].tolist(), logp.gather(1, tokens)[:, 0].tolist()


def groups(trainer: LightningTrainer, config: TrainerConfig, step: int) -> Iterator[tuple[list[Sample], list[float]]]:
    """Each group's rows (none if all rewards are equal) and rewards."""
    asked = [question for question in QUESTIONS for _ in range(config.group_size)]
    guesses, first = sampled(trainer, [[0, question] for question in asked])
    answers, second = sampled(trainer, [[0, q, guess, CHECK] for q, guess in zip(asked, guesses, strict=True)])
    rewards = [1.0 if a == WORD[q] else 0.3 if a in (YES, NO) else 0.0 for q, a in zip(asked, answers, strict=True)]
    for start in range(0, len(asked), config.group_size):
        own, rows = range(start, start + config.group_size), []
        baselines = group_baselines(config.baseline, [rewards[i] for i in own])
        for i, baseline in zip(own, baselines or (), strict=False):
            a = baseline.advantage(rewards[i])
            ids, mask = (0, asked[i], guesses[i], CHECK, answers[i]), (0, 0, 1, 0, 1)
            logps, advantages = (0.0, 0.0, first[i], 0.0, second[i]), (0.0, 0.0, a, 0.0, a)
            rows.append(Sample(f"{step}-{i}", str(asked[i]), ids, mask, logps, advantages, (1.0,) * 5))
        yield rows, [rewards[i] for i in own]


def run(settings: dict[str, Any], seed: int, batches: int = BATCHES) -> End:
    """Train for so many batches."""
    torch.manual_seed(seed)
    seen: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        model = save_small_model(Path(directory) / "model", seed)
        config = TrainerConfig.model_validate({"report_to": [], "dtype": "float32", "threads": 1, **settings})
        trainer = LightningTrainer(config, PolicyConfig(model=str(model), directory=Path(directory)))
        entropy = float("nan")
        for step in range(batches):
            found = list(groups(trainer, config, step))
            if rows := tuple(row for own, _ in found for row in own):
                entropy = trainer.step(Batch(step, rows, (), compared=config.group_size * len(found)))["entropy"]
            rewards = [reward for _, own in found for reward in own]
            seen.append((fmean(rewards), fmean(not own for own, _ in found), entropy))
    means = [fmean(reward for reward, *_ in seen[i : i + WINDOW]) for i in range(max(1, batches - WINDOW + 1))]
    _, equal, entropies = map(fmean, zip(*seen[-WINDOW:], strict=True))
    return End(max(means), means[-1], equal, entropies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    option(parser, "one-word")
    options = parser.parse_args()
    page = Page("What keeps a policy from one word for everything")
    cases = [(rate, name) for rate, name in product(RATES, SETTINGS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        settings = [{"learning_rate": rate, **SETTINGS[name]} for rate, name in cases for _ in range(SEEDS)]
        ends = list(pool.map(run, settings, [*range(SEEDS)] * len(cases)))
    rows = []
    for i, (rate, name) in enumerate(cases):
        own = ends[i * SEEDS : (i + 1) * SEEDS]
        last = ", ".join(f"{one.last:.2f}" for one in own)
        means = End(*map(fmean, zip(*own, strict=True)))
        numbers = (f"{means.last:.2f}", f"{means.best:.2f}", f"{means.equal:.0%}", f"{means.entropy:.2f}")
        rows.append((f"{rate:g}", name, last, *numbers))
    about = f"Means of {WINDOW} of {BATCHES} batches: the last by seed, their mean, and the mean of each seed's best:"
    head = ("rate", "settings", "last, by seed", "last", "best", "groups of equal rewards", "entropy")
    page.table(about, head, rows)
    page.save(options.page)


if __name__ == "__main__":
    main()
