"""Automatic prompt optimisation: textual gradients and beam search (ProTeGi, arXiv 2305.03495).

A critic reads a few rollouts and says what is wrong with the prompt, the textual gradient. An editor rewrites the
prompt. The best prompts of all enter the next round.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ...commands.run.tasks import Task
from .lessons import feedback, inputs, outputs
from .scores import BudgetSpent, Candidate, Score
from .search import Search

CRITIC = """You improve the prompt of an agent. This is the prompt:

<prompt>
{prompt}
</prompt>

These are some of the agent's runs with it, each with what came of it:

{runs}

Say what in the prompt led to low rewards, and what is missing in it. Be specific: name the failure, the words of the
prompt that caused it, and what would prevent it. Do not write a new prompt."""

EDITOR = """You improve the prompt of an agent. This is the prompt:

<prompt>
{prompt}
</prompt>

A critic, who has read runs of the agent, says:

<critique>
{critique}
</critique>

Rewrite the prompt so that it answers the critique. Keep what works, and every placeholder. Answer with the new prompt
alone, between <prompt> and </prompt>."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How wide and long the search is: prompts kept each round, new ones of each, runs that a critic reads, rounds."""

    beam: int = 4
    branch: int = 4
    gradient_batch: int = 4
    rounds: int = 3


async def search(job: Search, sizes: Sizes) -> None:
    """Try prompts until the rounds are over or the budget is spent; all versions tried are in `job.tried`."""
    rng = random.Random(job.seed)
    try:
        version = await job.scores.version_of(job.text)
        beam = [await job.validate(version, job.text)]
        for round_ in range(1, sizes.rounds + 1):
            for parent in list(beam):
                for _ in range(sizes.branch):
                    batch = rng.sample(job.lessons, min(sizes.gradient_batch, len(job.lessons)))
                    text = await _edited(job, parent, batch)
                    version = await job.scores.version_of(text, parent.version, f"apo, round {round_}")
                    beam.append(await job.validate(version, text))
            distinct = {one.version: one for one in beam}.values()
            beam = sorted(distinct, key=lambda one: (-one.mean, one.version))[: sizes.beam]
    except BudgetSpent:
        return


async def _edited(job: Search, parent: Candidate, tasks: Sequence[Task]) -> str:
    scores = await job.scores.of(parent.version, tasks)
    runs = "\n\n".join([await _run(job, score) for score in scores])
    critique = await job.reflection.ask(CRITIC.format(prompt=parent.text, runs=runs))
    answer = await job.reflection.ask(EDITOR.format(prompt=parent.text, critique=critique))
    return between(answer) or parent.text


async def _run(job: Search, score: Score) -> str:
    rollout = await job.scores.lesson(score)
    return f"<run>\nasked: {inputs(rollout)}\n{outputs(rollout)}\n{feedback(rollout)}\n</run>"


def between(answer: str) -> str | None:
    """Return the text between the tags that the editor was to write; None without them."""
    _, opened, rest = answer.partition("<prompt>")
    text, closed, _ = rest.rpartition("</prompt>")
    return text.strip() or None if opened and closed else None
