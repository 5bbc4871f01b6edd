"""The further metrics of a run of fine-tuning: name, unit and meaning, by group."""

from __future__ import annotations

GROUPS = {
    "sft": (
        ("held_out_loss_before", "nats", "mean cross-entropy of the answers' tokens of held-out tasks, before the run"),
        ("held_out_loss", "nats", "the same after the run; both need held-out tasks (`tune.sft.held_out`)"),
        ("token_accuracy", "share", "trained tokens that were the likeliest; mean over the last epoch"),
        ("calls_untokenised", "count", "calls of other models left out: the policy's chat template does not show them"),
    ),
    "dpo": (
        ("pairs", "count", "pairs that are trained on"),
        ("pairs_held_out", "count", "pairs of held-out tasks"),
        ("pairs_other_prompt", "count", "pairs left out: their answers begin after different prompts"),
        ("preference_margin", "1", "beta times the growth of log-odds, chosen to rejected; mean over the last epoch"),
        ("preference_accuracy", "share", "pairs whose log-odds grew; mean over the last epoch"),
    ),
    "kto": (
        ("thumbs_up", "count", "training rows of rollouts with thumbs up"),
        ("thumbs_down", "count", "training rows of rollouts with thumbs down"),
    ),
    "preferences": (
        ("held_out_accuracy_before", "share", "held-out comparisons whose better answer is likelier, before the run"),
        ("held_out_accuracy", "share", "the same after the run; these need held-out tasks"),
        ("held_out_margin_before", "nats", "mean log-probability of better minus worse held-out answers, before"),
        ("held_out_margin", "nats", "the same after the run"),
    ),
}  # fmt: skip
