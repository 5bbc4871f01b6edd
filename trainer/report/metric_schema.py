"""What a training step reports: every metric's name, unit and meaning. Plain data, no torch.

A new metric is one line here, and the same line in docs/metrics.md (a test compares them, and says what is missing).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """`group` is the part of a tracker's charts that it stands in; `unit` "1": a plain number, a share or a ratio."""

    name: str
    group: str
    unit: str
    meaning: str

    @property
    def tag(self) -> str:
        """Its name in TensorBoard, W&B, MLflow and trackio."""
        return f"{self.group}/{self.name}"


def _group(group: str, *metrics: tuple[str, str, str]) -> dict[str, Metric]:
    return {name: Metric(name, group, unit, meaning) for name, unit, meaning in metrics}


METRICS: Mapping[str, Metric] = MappingProxyType({
    **_group(
        "reward",
        ("reward_mean", "reward", "mean over `rollouts`, those that taught nothing included"),
        ("reward_std", "reward", "their standard deviation"),
        ("reward_min", "reward", "the least of them"),
        ("reward_max", "reward", "the greatest of them"),
        ("reward_task_std", "reward", "standard deviation of the tasks' means: how far apart they are"),
    ),
    **_group(
        "advantage",
        ("advantage_mean", "1", "mean over trained tokens; far from 0 where long answers do better, or worse"),
        ("advantage_std", "1", "their standard deviation"),
        ("advantage_positive", "share", "trained tokens that are made more likely"),
    ),
    **_group(
        "groups",
        ("groups", "count", "groups looked at since the step before; all rollouts without a task are one"),
        ("groups_trained", "count", "of them, those with a rollout that is trained on"),
        ("groups_equal", "count", "comparisons that taught nothing: all returns equal"),
        ("groups_incomplete", "count", "smaller than `trainer.group_size` after `trainer.group_timeout_s`"),
        ("rollouts", "count", "rewarded rollouts looked at since the step before"),
        ("rollouts_trained", "count", "of them, those that are trained on"),
        ("rollouts_dropped", "count", "rollouts that will not be trained on; `rollouts show` says why, one by one"),
        ("rollouts_stale", "count", "of these, those that too old a version sampled (`trainer.max_staleness`)"),
        ("rollouts_failed", "count", "failed rollouts that count by `trainer.failed_rollouts`"),
        ("rollouts_lone", "count", "rollouts compared with earlier ones (`trainer.lone_rollouts: running`)"),
    ),
    **_group(
        "samples",
        ("samples", "count", "training rows"),
        ("calls", "count", "calls in these rows"),
        ("calls_merged", "count", "of them, those that go on with the row of an earlier one"),
        ("merge_rate", "share", "of the calls whose rollout had a row already, those that go on with it"),
        ("forks_drift", "count", "calls with a row of their own: the last answer came back tokenised differently"),
        ("forks_edited", "count", "the same: an earlier part of the history did, or the agent went on from there"),
        ("forks_repeated", "count", "the same: the very same prompt, or less of it, was sent again"),
        ("forks_adjoining", "count", "the same: nothing came between it and the answer before (completions)"),
        ("forks_new", "count", "the same: another agent, or a new conversation"),
        ("calls_untrainable", "count", "left out: without token ids, log-probabilities or answer, or at temperature 0"),
        ("calls_not_finite", "count", "left out: a captured log-probability is no number"),
        ("calls_other_tokens", "count", "left out: of tokens that the model does not have; another one sampled them"),
        ("calls_ambiguous", "count", "left out: several answers (n > 1), so the reward is no one answer's"),
        ("calls_of_others", "count", "left out: of agents that are not trained (`trainer.agents`)"),
        ("rows_too_long", "count", "rows left out: longer than `trainer.max_sample_tokens` or the model's context"),
    ),
    **_group(
        "policy",
        ("version", "number", "the policy version that the step was published as; missing where it was not"),
        ("staleness_mean", "versions", "live version less the oldest of a rollout; mean over `rollouts_trained`"),
        ("staleness_max", "versions", "the greatest of these"),
        ("ratio_mean", "1", "a token's probability by the trainer over that by the sampler; mean over trained tokens"),
        ("ratio_max", "1", "the greatest of these"),
        ("clip_share", "share", "trained tokens that are clipped: ratio too high, advantage > 0; (grpo) too low, < 0"),
        ("kl", "nats", "KL divergence of the sampler from the trainer; mean over trained tokens (estimator k3)"),
        ("kl_base", "nats", "the same of the policy from the base model; missing without `kl_coef` and `kl_metric`"),
        ("entropy", "nats", "of the next token's distribution, mean over trained tokens"),
    ),
    **_group(
        "optimizer",
        ("loss", "1", "TRL's loss, in which every rollout weighs the same"),
        ("grad_norm", "1", "of the gradient before it is clipped to `trainer.max_grad_norm`, of all adapters together"),
        ("lr", "1", "learning rate of the step"),
        ("skipped", "0 or 1", "1: nothing to train on, or loss or gradient not finite; the weights are as before"),
    ),
    **_group(
        "tokens",
        ("trained_tokens", "tokens", "sampled tokens that the loss is over"),
        ("computed_tokens", "tokens", "tokens in forward passes, every shared prefix once"),
        ("padded_tokens", "tokens", "tokens that the same rows would take as padded batches"),
        ("trained_tokens_per_s", "tokens/s", "`trained_tokens` / `step_s`"),
        ("computed_tokens_per_s", "tokens/s", "`computed_tokens` / `step_s`"),
        ("micro_batches", "count", "forward passes"),
    ),
    **_group(
        "seconds",
        ("wait_s", "s", "nothing to do: from the end of the step before until enough rollouts had ended"),
        ("collect_s", "s", "reading the rollouts, comparing and claiming them; a judge's answers included"),
        ("step_s", "s", "the training step: the next two, and what is between them"),
        ("forward_backward_s", "s", "forward and backward passes"),
        ("optimizer_s", "s", "the optimizer's update"),
        ("checkpoint_s", "s", "writing the checkpoint"),
        ("publish_s", "s", "saving the weights, loading them into vLLM, verifying them, moving the alias"),
    ),
})  # fmt: skip

# What a run of `train --method sft` reports besides those of the above that apply to it.
SFT_METRICS: Mapping[str, Metric] = MappingProxyType(
    _group(
        "sft",
        ("held_out_loss_before", "nats", "mean cross-entropy of the answers' tokens of held-out tasks, before the run"),
        ("held_out_loss", "nats", "the same after it; both missing without held-out tasks (`trainer.sft.held_out`)"),
        ("token_accuracy", "share", "trained tokens that were the likeliest; mean over the last epoch"),
        ("epochs", "count", "passes over the rows"),
        ("optimizer_steps", "count", "updates of the weights in all epochs"),
        ("groups_held_out", "count", "tasks that are only measured on"),
        ("calls_untokenised", "count", "left out: of other models, and the policy's chat template does not show them"),
    )
)
ALL_METRICS: Mapping[str, Metric] = MappingProxyType({**METRICS, **SFT_METRICS})


def by_tag(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A step's numbers under their trackers' tags."""
    return {ALL_METRICS[name].tag if name in ALL_METRICS else name: value for name, value in scalars(metrics).items()}


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A step's numbers, without its rewards by task."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def table(group: str) -> str:
    """The rows of a group as docs/metrics.md has them."""
    return "".join(f"| `{m.name}` | {m.unit} | {m.meaning} |\n" for m in ALL_METRICS.values() if m.group == group)
