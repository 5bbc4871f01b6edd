"""Losses by functions that `trainer.loss` and `context_loss` name: of `algorithms/`, or a user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ..functions import faults, load, own_functions
from ..types import Sample

SETTING = "trainer.loss"
CONTEXT = "trainer.context_loss"
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss. All tensors are (A, L): A answers of at most L tokens, 0 where `mask` is 0.

    `logprobs`: of the policy that is trained, with a gradient. `sampled_logprobs`: of the distribution that was
    sampled. `advantages`: the same for every token of an answer, but for what guides add to single tokens. `config`:
    the section `trainer`.
    """

    logprobs: Tensor
    sampled_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    config: TrainerConfig

    @property
    def ratios(self) -> Tensor:
        """Return the importance ratios, finite and without a gradient."""
        return (self.logprobs.detach() - self.sampled_logprobs).clamp(max=MAX_LOG_RATIO).exp()


def own_loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: TrainerConfig) -> Tensor:
    """Return the weighted sum of the function's values of the tokens. Raise ConfigError for another shape.

    The weights are those of `loss_type` or `weighting`: they make the sum a mean over rollouts, answers or tokens.
    """
    name = str(config.loss)
    function, mask = load(SETTING, name), inputs["completion_mask"]
    given = LossInputs(logprobs, inputs["old_per_token_logps"], inputs["advantages"] * mask, mask, config)
    with faults(SETTING, name):
        of_tokens = function(given)
    if not isinstance(of_tokens, torch.Tensor) or of_tokens.shape != mask.shape:
        raise ConfigError(f"{SETTING} {name}: a tensor of shape {tuple(mask.shape)} is needed, one number per token")
    return (torch.where(mask.bool(), of_tokens, 0.0) * inputs["token_weights"]).sum()


def masked_tokens(loss: Tensor, logprobs: Tensor, inputs: Mapping[str, Tensor], config: TrainerConfig) -> Tensor:
    """Return (A, L): the tokens with an advantage that the loss gives no gradient. Raise ConfigError if it has none."""
    slopes = _gradient(SETTING, config.loss, loss, logprobs)
    return inputs["completion_mask"].bool() & (inputs["advantages"] != 0) & (slopes == 0)


def _gradient(setting: str, name: str | None, loss: Tensor, logprobs: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, logprobs, retain_graph=True, allow_unused=True) if loss.requires_grad else (None,)
    if found[0] is None:
        raise ConfigError(
            f"{setting} {name}: it has no gradient, so nothing would be learned: compute it from the log-probabilities "
            "of the policy (given.logprobs); given.ratios and given.sampled_logprobs carry none"
        )
    return found[0]


def check_gradients(config: TrainerConfig) -> None:
    """Raise ConfigError if a loss of the user's own fails on two short answers, or has no gradient there."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    logprobs = (mask * torch.tensor([[-1.0], [-0.5]])).requires_grad_()
    inputs = {"completion_mask": mask, "token_weights": mask, "advantages": mask * torch.tensor([[1.0], [-1.0]])}
    inputs["old_per_token_logps"] = logprobs.detach() * 1.01
    zeros = (0.0,) * 3
    of_tools = Sample("", "", (0,) * 3, (0,) * 3, zeros, zeros, (1.0,) * 3, results=((1, 3),))
    for setting, name in own_functions(config):
        if setting == SETTING:
            masked_tokens(own_loss(logprobs, inputs, config), logprobs, inputs, config)
        elif setting == CONTEXT:
            _gradient(setting, name, context_loss(logprobs[:1], [of_tools], StepTokens(3, 2), config), logprobs)


class StepTokens(NamedTuple):
    """How many tokens a step trains of an adapter, and how many its tools wrote."""

    trained: int
    results: int


def tokens_by_adapter(samples: Sequence[Sample]) -> dict[str, StepTokens]:
    """Count the tokens of each adapter."""
    trained, results = Counter[str](), Counter[str]()
    for sample in samples:
        trained[sample.adapter] += sample.trained_tokens
        results[sample.adapter] += sample.result_tokens
    return {adapter: StepTokens(count, results[adapter]) for adapter, count in trained.items()}


def context_loss(logprobs: Tensor, samples: Sequence[Sample], step: StepTokens, config: TrainerConfig) -> Tensor:
    """Return what the function adds to the loss for the tokens that tools wrote; 0 without any.

    `logprobs`: (B, T), of all tokens of the B samples that are scored. The function gets those of the K results.
    """
    places = [(row, i) for row, s in enumerate(samples) for span in s.results for i in range(*span)]
    if not places:
        return logprobs.new_zeros(())
    rows, columns = torch.tensor(places, device=logprobs.device).T
    name = str(config.context_loss)
    function = load(CONTEXT, name)
    with faults(CONTEXT, name):
        added = function(logprobs[rows, columns], step.results, config)
    if not isinstance(added, torch.Tensor) or added.shape:
        raise ConfigError(f"{CONTEXT} {name}: one number is needed, a tensor without dimensions")
    return added
