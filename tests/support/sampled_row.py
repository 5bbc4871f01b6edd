"""A training row of given turns."""

from __future__ import annotations

from lightning_proxy.trainer.types import Sample


def row(rollout: str, task: str, *turns: tuple[list[int], list[int], list[float], float]) -> Sample:
    """A row of turns: (context, answer, its captured log-probabilities, its advantage)."""
    parts: list[tuple[int, int, float, float]] = []
    for context, answer, logprobs, advantage in turns:
        parts += [(token, 0, 0.0, 0.0) for token in context]
        parts += [(token, 1, logp, advantage) for token, logp in zip(answer, logprobs, strict=True)]
    ids, mask, logprobs, advantages = (tuple(column) for column in zip(*parts, strict=True))
    return Sample(rollout, task, ids, mask, logprobs, advantages, (1.0,) * len(parts))
