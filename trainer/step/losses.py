"""The loss: TRL's term for every token, or a function's; the weight of each token; entropy bonus and guidance.

The loss does not depend on how calls are merged into rows and how a step is cut into micro-batches. Three things make
it so. A sequence in TRL's sense is one answer: the action of a call, the unit that has one advantage (arXiv 2508.03680,
section 3). The weights of tokens are known before the step begins; TRL divides by what a micro-batch holds. The KL to
the base model carries the same weights and cap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.config.trainer import EntropyConfig, TrainerConfig
from ...core.errors import ConfigError
from ..functions import faults, load, own_functions
from ..types import Sample

OWN_LOSS = "trainer.loss"
CONTEXT_LOSS = "trainer.context_loss"
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss type: the TRL loss type whose term a token has, and the divisor of the sum over a rollout's tokens.

    Divisors: `own` is the number of the rollout's tokens, so that rollouts weigh the same; `mean` is the mean number
    over the step's rollouts, so that tokens weigh the same; `limit` is `trainer.max_sample_tokens`; `one` is 1.
    """

    term: Literal["dapo", "cispo", "sapo", "vespo"]
    divisor: Literal["own", "mean", "limit", "one"]


# TRL's grpo, dr_grpo, dapo, bnpo and luspo have the same term, and differ in what they divide by.
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cispo": Loss("cispo", "own"),
        "grpo": Loss("dapo", "own"),
        "sapo": Loss("sapo", "own"),
        "vespo": Loss("vespo", "own"),
        "dapo": Loss("dapo", "mean"),
        "bnpo": Loss("dapo", "mean"),
        "dr_grpo": Loss("dapo", "limit"),
        "luspo": Loss("dapo", "one"),
    }
)

# `trainer.weighting` in place of the loss's own. For `sequence`, what is counted is answers.
WEIGHTINGS = {"token": "mean", "rollout": "own", "sequence": "mean"}


def weight_limits(config: TrainerConfig) -> tuple[float, float]:
    """Return the least and greatest importance ratio that do not count as clipped."""
    if LOSSES[config.loss_type].term == "dapo":
        return 1 - config.clip_low, 1 + config.clip_high
    return 0.0, config.importance_cap


def token_weights(samples: Sequence[Sample], config: TrainerConfig, compared: int = 0) -> dict[str, float]:
    """Return the weight of each trained token in the step's loss, by rollout, without rollouts that have no tokens.

    The loss is averaged over `compared` rollouts, those that teach nothing included; 0 stands for those of `samples`.
    With `weighting: sequence` it is the weight of each answer, which its tokens share (`loss_inputs`).
    """
    tokens: Counter[str] = Counter()
    for sample in samples:
        by_answer = config.weighting == "sequence"
        tokens[sample.rollout_id] += len([*answer_spans(sample)]) if by_answer else sample.trained_tokens
    tokens = +tokens  # drops rollouts without any
    mean = tokens.total() / max(len(tokens), 1)
    divisors = {"mean": mean, "limit": float(config.max_sample_tokens or 1), "one": 1.0}
    divisor = WEIGHTINGS.get(config.weighting, LOSSES[config.loss_type].divisor)
    rollouts = compared or len(tokens)
    return {rollout_id: 1 / (rollouts * divisors.get(divisor, own)) for rollout_id, own in tokens.items()}


@dataclass(frozen=True, slots=True)
class Answers:
    """The places of the A answers of B samples in (B, T) tensors. Each becomes a row of length L."""

    rows: Tensor  # (A, 1)
    columns: Tensor  # (A, L)
    mask: Tensor  # (A, L), 1.0 where there is a token

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Answers:
        spans = [(row, *span) for row, sample in enumerate(samples) for span in answer_spans(sample)]
        rows, starts, ends = torch.tensor(spans, device=device).reshape(-1, 3, 1).unbind(1)
        longest = int((ends - starts).max()) if spans else 0
        columns = starts + torch.arange(longest, device=device)
        return cls(rows, columns.minimum(ends - 1), (columns < ends).float())

    def take(self, values: Tensor) -> Tensor:
        """Gather (B, T) -> (A, L), with zeros where there is no token."""
        return torch.where(self.mask.bool(), values[self.rows, self.columns], 0.0)


def answer_spans(sample: Sample) -> Iterator[tuple[int, int]]:
    """Return [start, end) of each answer: an unbroken run of sampled tokens with one advantage."""
    end = 0
    for (sampled, _), tokens in groupby(zip(sample.mask, sample.advantages, strict=True)):
        start, end = end, end + len(list(tokens))
        if sampled:
            yield start, end


def loss_inputs(
    samples: Sequence[Sample], answers: Answers, weights: Mapping[str, float], *, by_answer: bool = False
) -> dict[str, Tensor]:
    """Return the inputs of the loss, apart from the policy's log-probabilities: (A, L) each, 0 without a token.

    `by_answer`: the weights are those of answers, and not of tokens.
    """
    mask = answers.mask
    shares = mask / mask.sum(1, keepdim=True) if by_answer else mask
    of_rows = torch.tensor([weights[sample.rollout_id] for sample in samples], device=mask.device)
    return {
        "completion_mask": mask,
        "advantages": answers.take(padded([s.advantages for s in samples], mask.device)),
        "old_per_token_logps": answers.take(padded([s.logprobs for s in samples], mask.device)),
        "token_weights": of_rows[answers.rows] * shares,
    }


def leave_out_tokens(inputs: dict[str, Tensor], logprobs: Tensor) -> Tensor:
    """Take the tokens whose log-probability is -inf out of `inputs`; return the log-probabilities without them.

    The policy that is trained would not sample them: its top_p and the like leave them out under the present weights.
    The tokens that stay keep their weights.
    """
    outside = logprobs.detach().isneginf()
    for name in ("completion_mask", "token_weights"):
        inputs[name] = inputs[name].masked_fill(outside, 0.0)
    return torch.where(outside, inputs["old_per_token_logps"], logprobs)


def policy_loss(logprobs: Tensor, inputs: Mapping[str, Tensor], config: TrainerConfig) -> Tensor:
    """Sum each token's weight times its term, which is that of TRL's GRPOTrainer.

    `importance_cap` bounds weights that nothing else bounds: sapo's gate and vespo's weighting stay under 1.6 and 1.3
    with their default settings.
    """
    mask, term = inputs["completion_mask"], LOSSES[config.loss_type].term
    weighted = inputs["advantages"] * inputs["token_weights"]
    log_ratios = logprobs - inputs["old_per_token_logps"]
    ratios = importance_ratios(log_ratios, mask, config.importance_level)
    if term == "cispo":
        gains = ratios.detach().clamp(max=config.importance_cap) * weighted * logprobs
    elif term == "sapo":
        temperatures = torch.where(weighted > 0, config.sapo.temperature_pos, config.sapo.temperature_neg)
        gains = torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * weighted
    elif term == "vespo":
        gains = _gamma_weights(log_ratios.detach(), weighted, mask, config) * weighted * logprobs
    else:
        clipped = ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
        bounded = ratios.clamp(max=max(config.importance_cap, 1 + config.clip_high))
        gains = torch.min(bounded * weighted, clipped * weighted)
    return -gains.sum()


def _gamma_weights(log_ratios: Tensor, advantages: Tensor, mask: Tensor, config: TrainerConfig) -> Tensor:
    """VESPO's weight of an answer, w^k · e^(λ - λw) of its sequence ratio w: (A, L)."""
    log_w = (log_ratios.clamp(-20.0, 20.0) * mask).sum(1, keepdim=True).clamp(math.log(1e-8), 20.0)
    good = advantages >= 0
    k = torch.where(good, config.vespo.k_pos, config.vespo.k_neg)
    limit = torch.where(good, config.vespo.lambda_pos, config.vespo.lambda_neg)
    return (limit + k * log_w - limit * log_w.exp()).exp()


def importance_ratios(log_ratios: Tensor, mask: Tensor, level: str) -> Tensor:
    """Turn (A, L) log-ratios into ratios: per token, or an answer's geometric mean (GSPO, arXiv 2507.18071)."""
    if level == "sequence":
        log_ratios = ((log_ratios * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(
            log_ratios
        )
    return log_ratios.exp()


def kl_penalty(logprobs: Tensor, reference: Tensor, inputs: Mapping[str, Tensor], cap: float) -> Tensor:
    """Compute the KL to the reference, weighted like the loss: sum of weight · min(ratio, cap) · (logp - ref)² / 2.

    Its gradient, ratio · (logp - ref) · ∇logp, is that of TRL's ratio · k3 (`use_bias_correction_kl`; DeepSeek-V3.2,
    arXiv 2512.02556). Apart from the cap, it is the unbiased gradient of the reverse KL.
    """
    ratios = (logprobs.detach() - inputs["old_per_token_logps"]).exp().clamp(max=cap)
    return (inputs["token_weights"] * ratios * (logprobs - reference) ** 2).sum() / 2


def padded(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Return (B, T) in float32, with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], True).to(device)


class EntropyBonus:
    """Decides the weight of the mean entropy in the loss, as TRL does (`entropy_coef`, `use_adaptive_entropy`).

    With a target, the weight grows by `delta` after each step whose entropy is at or below the target, and shrinks
    after the others. It counts only after a step at or below the target (Skywork-OR1, arXiv 2505.22312, section 3.2).
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._coef = config.coef
        self._is_low = config.target is None

    @property
    def weight(self) -> float:
        """Return the weight in the next step."""
        return self._coef if self._is_low else 0.0

    def update(self, entropy: float) -> None:
        """Note the mean entropy of a step."""
        config = self._config
        if config.target is None:
            return
        self._is_low = entropy <= config.target
        change = config.delta if self._is_low else -config.delta
        self._coef = min(max(self._coef + change, 0.0), config.max_coef)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"coef": self._coef, "is_low": self._is_low}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint. A fixed weight is the configured one."""
        if self._config.target is not None and state:
            self._coef, self._is_low = min(state["coef"], self._config.max_coef), state["is_low"]


def entropy_term(entropies: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """Return the term that (A, L) entropies, where `mask` is 1, add to the mean over all `tokens` of the step."""
    return (entropies * mask).sum() / tokens


def add_guidance(
    inputs: dict[str, Tensor], samples: Sequence[Sample], answers: Answers, logprobs: Tensor, limit: float
) -> None:
    """Add weight · clip(guide's log-probability - the policy's, -limit, limit) to the advantages.

    Such an advantage is that of the reverse KL: its policy gradient brings the policy nearer to the guide (MiniLLM,
    arXiv 2306.08543). `logprobs`: the policy's, (A, L). `inputs` get `guidance`, what is added; `guided`, where the
    guide spoke; and `guide_gap`, the clipped difference there. All are (A, L).
    """
    there = inputs["completion_mask"].bool()
    scores = [s.guidance.logprobs if s.guidance else (math.nan,) * len(s.mask) for s in samples]
    guide = answers.take(padded(scores, there.device))
    weights = torch.tensor([s.guidance.weight if s.guidance else 0.0 for s in samples], device=there.device)
    inputs["guided"] = ~guide.isnan() & there
    inputs["guide_gap"] = (guide - logprobs.detach()).clamp(-limit, limit).where(inputs["guided"], 0.0)
    inputs["guidance"] = weights[answers.rows] * inputs["guide_gap"]
    inputs["advantages"] = inputs["advantages"] + inputs["guidance"]


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
    function, mask = load(OWN_LOSS, name), inputs["completion_mask"]
    given = LossInputs(logprobs, inputs["old_per_token_logps"], inputs["advantages"] * mask, mask, config)
    with faults(OWN_LOSS, name):
        of_tokens = function(given)
    if not isinstance(of_tokens, torch.Tensor) or of_tokens.shape != mask.shape:
        raise ConfigError(f"{OWN_LOSS} {name}: a tensor of shape {tuple(mask.shape)} is needed, one number per token")
    return (torch.where(mask.bool(), of_tokens, 0.0) * inputs["token_weights"]).sum()


def masked_tokens(loss: Tensor, logprobs: Tensor, inputs: Mapping[str, Tensor], config: TrainerConfig) -> Tensor:
    """Return (A, L): the tokens with an advantage that the loss gives no gradient. Raise ConfigError if it has none."""
    slopes = _gradient(OWN_LOSS, config.loss, loss, logprobs)
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
        if setting == OWN_LOSS:
            masked_tokens(own_loss(logprobs, inputs, config), logprobs, inputs, config)
        elif setting == CONTEXT_LOSS:
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
    function = load(CONTEXT_LOSS, name)
    with faults(CONTEXT_LOSS, name):
        added = function(logprobs[rows, columns], step.results, config)
    if not isinstance(added, torch.Tensor) or added.shape:
        raise ConfigError(f"{CONTEXT_LOSS} {name}: one number is needed, a tensor without dimensions")
    return added
