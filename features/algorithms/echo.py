"""ECHO: trains the policy to predict what its tools will answer, in addition to RL (`trainer.context_loss`).

    added to the loss = -w / N · sum of log p over the tokens that tools wrote,   w = algorithms.echo_weight

N is the number of such tokens in the step, so w does not depend on the length of results or on how the step is cut into
passes. w is 0.1, as in the authors' runs and prime-rl. A result is the context between two answers of a row if only
tool results were added there, including the chat template's text around them: nothing is tokenised again. Groups with
equal rewards are also trained on if they have results. `logprobs` has shape (K,), for one pass; the sum over a
step's passes is the formula above. Source: arXiv 2605.24517, section 3.1; prime-rl's `echo`, which also normalises by
the number of such tokens.

By hand, w = 0.1: a tool wrote two tokens, of probability 0.5 and 0.25. Added: 0.1 / 2 · (log 2 + log 4) = 0.104.
"""

from __future__ import annotations

from torch import Tensor

from ...core.config.trainer import TrainerConfig
from .config import AlgorithmsConfig


def echo(logprobs: Tensor, results: int, config: TrainerConfig) -> Tensor:
    """Return what one pass adds to the loss. `results`: the number of tool tokens in the step."""
    return -config.section(AlgorithmsConfig).echo_weight / results * logprobs.sum()
