"""The metrics of a training step: name, unit and meaning of each. Plain data, no torch.

To add one, add a line here or in a `TrainerPlugin.metrics`. `python docs/generate.py` writes docs/step-metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from ...core.features import modules


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `group` is its section in a tracker; the unit "1" means a plain number or a ratio."""

    name: str
    group: str
    unit: str
    meaning: str

    @property
    def tag(self) -> str:
        """Return the metric's name in trackers, where the prefix `train/` is added."""
        return f"{self.group}/{self.name}"


def group(name: str, *metrics: tuple[str, str, str]) -> dict[str, Metric]:
    """Return the metrics of a group, by name; each is a name, a unit and a meaning."""
    return {metric: Metric(metric, name, unit, meaning) for metric, unit, meaning in metrics}


METRICS: Mapping[str, Metric] = MappingProxyType({
    **group(
        "reward",
        ("reward_mean", "reward", "mean reward of `rollouts`"),
        ("reward_std", "reward", "their standard deviation"),
        ("reward_min", "reward", "the lowest"),
        ("reward_max", "reward", "the highest"),
        ("reward_task_std", "reward", "standard deviation of the tasks' mean rewards"),
    ),
    **group(
        "advantage",
        ("advantage_mean", "1", "mean over trained tokens; far from 0 if long answers do better or worse"),
        ("advantage_std", "1", "their standard deviation"),
        ("advantage_positive", "share", "trained tokens that the step makes more likely"),
    ),
    **group(
        "groups",
        ("groups", "count", "groups considered since the last step"),
        ("groups_trained", "count", "groups with a rollout that is trained on"),
        ("groups_equal", "count", "comparisons in which all returns are equal: they teach nothing"),
        ("groups_incomplete", "count", "groups smaller than `trainer.group_size` after `trainer.group_timeout_s`"),
        ("rollouts", "count", "rewarded rollouts considered since the last step"),
        ("rollouts_trained", "count", "rollouts that are trained on"),
        ("rollouts_dropped", "count", "rollouts that are never trained on; `rollouts show` says why"),
        ("rollouts_stale", "count", "dropped because they are older than `trainer.max_staleness`"),
        ("rollouts_failed", "count", "failed rollouts with the reward that `trainer.failed_rollouts` sets"),
        ("rollouts_lone", "count", "compared with earlier ones (`trainer.lone_rollouts`)"),
    ),
    **group(
        "samples",
        ("samples", "count", "training rows"),
        ("calls", "count", "calls in these rows"),
        ("calls_merged", "count", "calls that continue the row of an earlier call"),
        ("merge_rate", "share", "calls that continue a row, among those that could"),
        ("forks_drift", "count", "calls with a new row: the last answer came back as other tokens"),
        ("forks_edited", "count", "new row: the history was changed, or continued from an earlier point"),
        ("forks_repeated", "count", "new row: the same prompt, or less of it, was sent again"),
        ("forks_adjoining", "count", "new row: nothing follows the last answer (completions)"),
        ("forks_new", "count", "new row: another agent or a new conversation began"),
        ("calls_untrainable", "count", "calls left out: no token ids, log-probabilities or answer, or temperature 0"),
        ("calls_not_followed", "count", "calls left out: sampled in a way that the trainer cannot recompute"),
        ("not_followed_share", "share", "`calls_not_followed` among all calls of trained agents"),
        ("calls_not_finite", "count", "left out: a recorded log-probability is not a finite number"),
        ("calls_other_tokens", "count", "left out: another model sampled tokens that this model does not have"),
        ("calls_ambiguous", "count", "left out: several answers (n > 1)"),
        ("calls_of_others", "count", "left out: their agents are not in `trainer.agents`"),
        ("rows_too_long", "count", "rows left out: longer than `trainer.max_sample_tokens` or the model's context"),
        ("rows_out_of_memory", "count", "rows left out: memory ran out even in a separate pass"),
    ),
    **group(
        "policy",
        ("version", "number", "policy version that the step was published as"),
        ("verify_difference", "nats", "mean difference of vLLM's log-probabilities from the published weights'"),
        (
            "verify_deviations",
            "standard deviations",
            "how much nearer vLLM's answers are to the new weights than to the old ones",
        ),
        ("staleness_mean", "versions", "live version minus a rollout's oldest version; mean over `rollouts_trained`"),
        ("staleness_max", "versions", "the greatest"),
        ("ratio_mean", "1", "mean over trained tokens of the probability in the trainer over that in the sampler"),
        ("ratio_max", "1", "the greatest"),
        ("clip_share", "share", "clipped tokens: ratio too high, advantage > 0 (grpo: also too low, advantage < 0)"),
        ("kl", "nats", "KL divergence of the sampler from the trainer; mean over trained tokens (estimator k3)"),
        ("kl_base", "nats", "KL divergence of the policy from the base model; needs `kl_coef` or `kl_metric`"),
        (
            "sampler_difference",
            "nats",
            "√(2 · `kl`) over rows of the live version; if rounding cannot explain it, the step is skipped",
        ),
        ("entropy", "nats", "entropy of the next token's distribution; mean over trained tokens"),
        ("entropy_coef", "1", "its weight in the loss; needs `trainer.entropy`"),
    ),
    **group(
        "optimizer",
        ("loss", "1", "the loss of `loss_type`, with KL, entropy and `context_loss`"),
        ("grad_norm", "1", "norm of all gradients before `trainer.max_grad_norm`"),
        ("lr", "1", "learning rate"),
        ("skipped", "0 or 1", "1: the step was skipped, so the weights did not change; the log says why"),
    ),
    **group(
        "tokens",
        ("trained_tokens", "tokens", "sampled tokens in the loss"),
        ("outside_tokens", "tokens", "sampled tokens left out, because top_p and the like now exclude them"),
        ("masked_tokens", "tokens", "tokens that the mask of `trainer.loss` drops"),
        ("computed_tokens", "tokens", "tokens in forward passes; a shared prefix counts once"),
        ("trained_tokens_per_s", "tokens/s", "`trained_tokens` / `step_s`"),
        ("computed_tokens_per_s", "tokens/s", "`computed_tokens` / `step_s`"),
        ("micro_batches", "count", "forward passes"),
        ("passes_halved", "count", "passes halved, because memory ran out"),
        ("memory_gib", "GiB", "the trainer's peak, since its start"),
    ),
    **group(
        "seconds",
        ("wait_s", "s", "waiting for enough rollouts to end"),
        ("collect_s", "s", "reading, comparing and claiming rollouts"),
        ("step_s", "s", "the training step"),
        ("forward_backward_s", "s", "forward and backward passes"),
        ("optimizer_s", "s", "the optimizer's update"),
        ("checkpoint_s", "s", "writing the checkpoint"),
        ("verify_s", "s", "waiting for the live version to be verified"),
        ("publish_s", "s", "saving the weights, loading them into vLLM, verifying them, making them live"),
    ),
})  # fmt: skip
# What the methods of `train --method` but `rl` share.
TUNING = group(
    "tuning",
    ("epochs", "count", "passes over the rows"),
    ("optimizer_steps", "count", "updates of the weights in all epochs"),
    ("groups_held_out", "count", "held-out tasks"),
)


@cache
def all_metrics() -> Mapping[str, Metric]:
    """Return the metrics of the core and of the features, by name."""
    of_features = (metric for module in modules("trainer") for metric in module.plugin.metrics.items())
    return MappingProxyType({**METRICS, **TUNING, **dict(of_features)})


def by_tag(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's numbers by their tags in trackers."""
    known = all_metrics()
    return {known[name].tag if name in known else name: value for name, value in scalars(metrics).items()}


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those of a step's metrics that are numbers, not texts or rewards by task."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
