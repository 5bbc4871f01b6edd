"""The loss of a step: tokens' terms times their weights, KL to the base model, entropy bonus, guides, context loss.

The loss does not depend on how calls are merged into rows or how a step is cut into micro-batches, for two reasons.
What TRL calls a sequence is one answer here: the action of a call, the unit that has one advantage (arXiv 2508.03680,
section 3). And token weights are known before the step begins, while TRL divides by what a micro-batch holds.

In the formulas, r is a token's importance ratio: the policy's probability over the one it was sampled with, or with
`importance_level: sequence` the geometric mean of the answer's ratios (GSPO, arXiv 2507.18071). A is its advantage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.config.trainer import EntropyConfig, TrainerConfig
from ...core.errors import ConfigError
from ..functions import faults, load, own_functions
from ..types import Sample

OWN_LOSS = "trainer.loss"
CONTEXT_LOSS = "trainer.context_loss"
MAX_LOG_RATIO = 20.0  # exp() of more may overflow


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss. All tensors are (A, L): A answers of at most L tokens. Only tokens with `mask` 1 count.

    `logprobs` are those of the trained policy, with a gradient; `sampled_logprobs` are of the distribution that was
    sampled. `advantages` are the same for every token of an answer, except for what guides add to single tokens.
    `config` is the section `trainer`. `weights` has the factor of each token's term in the sum.
    """

    logprobs: Tensor
    sampled_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    config: TrainerConfig
    weights: Tensor

    @property
    def ratios(self) -> Tensor:
        """Return the importance ratios of tokens, finite and without a gradient."""
        return (self.logprobs.detach() - self.sampled_logprobs).clamp(max=MAX_LOG_RATIO).exp()

    @property
    def level_ratios(self) -> Tensor:
        """Return the ratios r in the formulas, with a gradient."""
        log_ratios = self.logprobs - self.sampled_logprobs
        if self.config.importance_level == "sequence":
            means = (log_ratios * self.mask).sum(1, keepdim=True) / self.mask.sum(1, keepdim=True).clamp(min=1)
            log_ratios = means.expand_as(log_ratios)
        return log_ratios.exp()

    def total(self, terms: Tensor) -> Tensor:
        """Return what these (A, L) terms add to the loss."""
        return (torch.where(self.mask.bool(), terms, 0.0) * self.weights).sum()


def clipped(given: LossInputs) -> Tensor:
    """Return PPO's -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), which grpo, dapo, bnpo, dr_grpo and luspo share.

    It assumes that a token which moved past the limit on its advantage's side needs no further push. Where A < 0,
    nothing in the papers bounds r; here `importance_cap` does (dual clip, arXiv 1912.09729; TRL's `delta`).
    By hand, with limits 0.8 and 1.3: r = 1.25, A = 1: -1.25, slope -1.25. r = 1.5, A = 1: -1.3, slope 0.
    r = 3, A = -1: 3, slope 3; with the cap of 2: 2, slope 0.
    """
    config, ratios = given.config, given.level_ratios
    high = 1 + config.clip_high
    bounded = ratios.clamp(max=max(config.cap, high)) * given.advantages
    return -torch.min(bounded, ratios.clamp(1 - config.clip_low, high) * given.advantages)


def cispo(given: LossInputs) -> Tensor:
    """Return CISPO's -sg(min(r, importance_cap)) A log p (arXiv 2506.13585); sg: without a gradient.

    It assumes that a bounded importance weight is better than none: no token loses its gradient.
    By hand, with a cap of 2: r = 1.5, A = 1: slope -1.5. r = 3, A = -1: slope 2.
    """
    return -given.level_ratios.detach().clamp(max=given.config.cap) * given.advantages * given.logprobs


def sapo(given: LossInputs) -> Tensor:
    """Return SAPO's -(4 / τ) σ(τ (r - 1)) A (arXiv 2511.20347).

    τ is 1, or 1.05 where A <= 0, as in the paper. It assumes that trust in a token fades with the distance of r
    from 1 on both sides, faster at a higher τ. By hand: r = 1: slope -A. r = 3, A = 1, τ = 1: -4 · 0.881 = -3.52, slope
    -4 · 0.105 · 3 = -1.26.
    """
    tau = torch.where(given.advantages > 0, 1.0, 1.05)
    return -torch.sigmoid(tau * (given.level_ratios - 1)) * 4 / tau * given.advantages


def vespo(given: LossInputs) -> Tensor:
    """Return VESPO's -sg(w^k e^(λ (1 - w))) A log p; w is the product of an answer's ratios (arXiv 2602.10693).

    k and λ are 2 and 3, or 3 and 2 where A < 0, as in TRL. It assumes that the policy finds entire answers likely or
    not, and gives less weight to answers that became much likelier or less likely. The weight stays under 1.3. By hand:
    w = 1: slope -A. w = 2, A = 1, k = 2, λ = 3: 4 · e^-3 = 0.2, slope -0.2.
    """
    good = given.advantages >= 0
    log_ratios = (given.logprobs - given.sampled_logprobs).detach().clamp(-20.0, 20.0)
    log_w = (log_ratios * given.mask).sum(1, keepdim=True).clamp(math.log(1e-8), 20.0)
    k, limit = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
    return -(limit + k * log_w - limit * log_w.exp()).exp() * given.advantages * given.logprobs


# By `loss_type`: the terms, and what a rollout's terms are divided by before the mean over rollouts is taken.
# `own`: the number of its tokens, so that rollouts weigh the same. `mean`: the mean number over the step's rollouts, so
# that tokens weigh the same. `limit`: `max_sample_tokens`. `one`: nothing.
LOSSES: Mapping[str, tuple[Callable[[LossInputs], Tensor], str]] = {
    "cispo": (cispo, "own"),
    "grpo": (clipped, "own"),
    "sapo": (sapo, "own"),
    "vespo": (vespo, "own"),
    "dapo": (clipped, "mean"),
    "bnpo": (clipped, "mean"),
    "dr_grpo": (clipped, "limit"),
    "luspo": (clipped, "one"),
}

# `trainer.weighting` in place of the loss's own. For `sequence`, what is counted is answers.
WEIGHTINGS = {"token": "mean", "rollout": "own", "sequence": "mean"}


def token_weights(samples: Sequence[Sample], config: TrainerConfig, compared: int = 0) -> dict[str, float]:
    """Return the weight of each trained token in the step's loss, by rollout. Rollouts without any are left out.

    The loss is averaged over `compared` rollouts, including those that teach nothing; 0 means the ones in `samples`.
    With `weighting: sequence` the weight is that of an answer, and its tokens share it. By hand: in rollouts of 3
    and 6 tokens, each token weighs 1/6 and 1/12 (`own`), or 1/9 in both (`mean`).
    """
    counts: Counter[str] = Counter()
    for sample in samples:
        by_answer = config.weighting == "sequence"
        counts[sample.rollout_id] += len([*answer_spans(sample)]) if by_answer else sample.trained_tokens
    counts = +counts  # drops rollouts without any
    mean = counts.total() / max(len(counts), 1)
    divisors = {"mean": mean, "limit": float(config.max_sample_tokens or 1), "one": 1.0}
    divisor = WEIGHTINGS.get(config.weighting, LOSSES[config.loss_type][1])
    rollouts = compared or len(counts)
    return {rollout_id: 1 / (rollouts * divisors.get(divisor, own)) for rollout_id, own in counts.items()}


@dataclass(frozen=True, slots=True)
class Answers:
    """The positions of the A answers of B samples in (B, T) tensors. Each answer becomes a row of length L."""

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

    def take_lists(self, values: Sequence[Sequence[float]]) -> Tensor:
        """Gather values that are one list per sample -> (A, L), in float32."""
        rows = [torch.tensor(row, dtype=torch.float32) for row in values]
        return self.take(torch.nn.utils.rnn.pad_sequence(rows, True).to(self.mask.device))


def answer_spans(sample: Sample) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each answer: an unbroken run of sampled tokens with one advantage."""
    end = 0
    for (sampled, _), tokens in groupby(zip(sample.mask, sample.advantages, strict=True)):
        start, end = end, end + len(list(tokens))
        if sampled:
            yield start, end


def loss_inputs(
    samples: Sequence[Sample], answers: Answers, logprobs: Tensor, weights: Mapping[str, float], config: TrainerConfig
) -> LossInputs:
    """Return the inputs of the loss. `logprobs` (A, L) are the policy's; `weights` come from `token_weights`.

    Tokens with log-probability -inf are removed: either filters such as top_p exclude them under the current weights,
    or their grammar cannot be replayed. The remaining tokens keep their weights.
    """
    outside = logprobs.detach().isneginf()
    shares = torch.tensor([weights[sample.rollout_id] for sample in samples], device=logprobs.device)[answers.rows]
    if config.weighting == "sequence":
        shares = shares / answers.mask.sum(1, keepdim=True)
    mask = answers.mask.masked_fill(outside, 0.0)
    sampled = answers.take_lists([sample.logprobs for sample in samples])
    advantages = answers.take_lists([sample.advantages for sample in samples]).masked_fill(outside, 0.0)
    return LossInputs(torch.where(outside, sampled, logprobs), sampled, advantages, mask, config, shares * mask)


def policy_loss(given: LossInputs) -> Tensor:
    """Return the weighted sum of the tokens' terms, by `loss_type` or by the user's own `loss`.

    Raises ConfigError if the user's function fails or does not return an (A, L) tensor.
    """
    if given.config.loss is None:
        return given.total(LOSSES[given.config.loss_type][0](given))
    name = given.config.loss
    function = load(OWN_LOSS, name)
    with faults(OWN_LOSS, name):
        terms = function(given)
    if not isinstance(terms, torch.Tensor) or terms.shape != given.mask.shape:
        shape = tuple(given.mask.shape)
        raise ConfigError(f"{OWN_LOSS} {name}: it must return a tensor of shape {shape}, one number per token")
    return given.total(terms)


def masked_tokens(loss: Tensor, given: LossInputs) -> Tensor:
    """Return an (A, L) mask of tokens with an advantage but no gradient. Raises ConfigError if the loss has none."""
    return (given.advantages != 0) & (_gradient(OWN_LOSS, given.config.loss, loss, given.logprobs) == 0)


def _gradient(setting: str, name: str | None, loss: Tensor, logprobs: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, logprobs, retain_graph=True, allow_unused=True) if loss.requires_grad else (None,)
    if found[0] is None:
        of = "given.logprobs; given.ratios and given.sampled_logprobs carry none" if setting == OWN_LOSS else "logprobs"
        raise ConfigError(
            f"{setting} {name}: it has no gradient, so nothing would be learned; compute it from the policy's "
            f"log-probabilities ({of})"
        )
    return found[0]


def check_gradients(config: TrainerConfig) -> None:
    """Raise ConfigError if a user's own loss or context loss fails on short answers, or has no gradient there."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    logprobs = (mask * torch.tensor([[-1.0], [-0.5]])).requires_grad_()
    given = LossInputs(
        logprobs, logprobs.detach() * 1.01, mask * torch.tensor([[1.0], [-1.0]]), mask, config, weights=mask
    )
    zeros = (0.0,) * 3
    of_tools = Sample("", "", (0,) * 3, (0,) * 3, zeros, zeros, (1.0,) * 3, results=((1, 3),))
    for setting, name in own_functions(config):
        if setting == OWN_LOSS:
            masked_tokens(policy_loss(given), given)
        elif setting == CONTEXT_LOSS:
            _gradient(setting, name, context_loss(logprobs[:1], [of_tools], 2, config), logprobs)


def kl_penalty(given: LossInputs, reference: Tensor) -> Tensor:
    """Return the KL to the base model, weighted like the loss. With d = log p - log p_base of a token:

    `kl_estimator: k2`: sg(min(ratio, cap)) d² / 2. Its gradient, ratio · d · ∇log p, is that of TRL's ratio · k3
    (`use_bias_correction_kl`; DeepSeek-V3.2, arXiv 2512.02556). Apart from the cap, it estimates the reverse KL's
    without bias.
    `k3`: e^-d - 1 + d, as in GRPO (arXiv 2402.03300). Its gradient, (1 - e^-d) ∇log p, is that of the forward KL.
    By hand, at d = 1 and a ratio of 1: k2 is 0.5 with the slope 1; k3 is 0.37 with the slope 0.63.
    """
    apart = given.logprobs - reference
    if given.config.kl_estimator == "k3":
        return given.total((-apart).exp() - 1 + apart)
    return given.total(given.ratios.clamp(max=given.config.cap) * apart**2 / 2)


class EntropyBonus:
    """Decides the weight of the mean entropy in the loss, as TRL does (`entropy_coef`, `use_adaptive_entropy`).

    With a target, the weight (0 to MOST) grows by DELTA after a step with entropy at or below the target, and shrinks
    after the others. It applies only after a step at or below the target (Skywork-OR1, arXiv 2505.22312, section 3.2).
    """

    DELTA, MOST = 0.005, 1.0

    def __init__(self, config: EntropyConfig) -> None:
        self._target, self._coef, self._is_low = config.target, config.coef, config.target is None

    @property
    def weight(self) -> float:
        return self._coef if self._is_low else 0.0

    def update(self, entropy: float) -> None:
        if self._target is not None:
            self._is_low = entropy <= self._target
            self._coef = min(max(self._coef + (self.DELTA if self._is_low else -self.DELTA), 0.0), self.MOST)

    def state(self) -> dict[str, Any]:
        return {"coef": self._coef, "is_low": self._is_low}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint. A fixed weight comes from the configuration instead."""
        if self._target is not None and state:
            self._coef, self._is_low = state["coef"], state["is_low"]


GUIDE_LIMIT = 5.0  # nats at one token


class Guided(NamedTuple):
    """What guides add to the advantages. `there` marks tokens with a value; `gap` is the clipped difference."""

    there: Tensor
    gap: Tensor
    added: Tensor


def guided(given: LossInputs, samples: Sequence[Sample], answers: Answers) -> tuple[LossInputs, Guided]:
    """Add weight · clip(guide's log-probability - the policy's, -GUIDE_LIMIT, GUIDE_LIMIT) to the advantages.

    This is the advantage of the reverse KL: its policy gradient moves the policy towards the guide (MiniLLM,
    arXiv 2306.08543).
    """
    guide = answers.take_lists([s.guidance.logprobs if s.guidance else (math.nan,) * len(s.mask) for s in samples])
    weights = torch.tensor([s.guidance.weight if s.guidance else 0.0 for s in samples], device=guide.device)
    there = ~guide.isnan() & given.mask.bool()
    gap = (guide - given.logprobs.detach()).clamp(-GUIDE_LIMIT, GUIDE_LIMIT).where(there, 0.0)
    added = weights[answers.rows] * gap
    return replace(given, advantages=given.advantages + added), Guided(there, gap, added)


def context_loss(logprobs: Tensor, samples: Sequence[Sample], results: int, config: TrainerConfig) -> Tensor:
    """Return what the user's function adds to the loss for the tokens that tools wrote; 0 if there are none.

    `logprobs` (B, T) are of all scored tokens of the B samples. The function gets only those of tool tokens, and
    `results`, the number of tool tokens in the adapter's whole step.
    """
    places = [(row, i) for row, s in enumerate(samples) for span in s.results for i in range(*span)]
    if not places:
        return logprobs.new_zeros(())
    rows, columns = torch.tensor(places, device=logprobs.device).T
    name = str(config.context_loss)
    function = load(CONTEXT_LOSS, name)
    with faults(CONTEXT_LOSS, name):
        added = function(logprobs[rows, columns], results, config)
    if not isinstance(added, torch.Tensor) or added.shape:
        raise ConfigError(f"{CONTEXT_LOSS} {name}: it must return a scalar tensor")
    return added
