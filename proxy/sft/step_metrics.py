"""The further metrics of a run of `train --method sft`: name, unit and meaning, by group."""

from __future__ import annotations

GROUPS = {
    "sft": (
        ("held_out_loss_before", "nats", "mean cross-entropy of the answers' tokens of held-out tasks, before the run"),
        ("held_out_loss", "nats", "the same after the run; both need held-out tasks (`trainer.sft.held_out`)"),
        ("token_accuracy", "share", "trained tokens that were the likeliest; mean over the last epoch"),
        ("calls_untokenised", "count", "calls of other models left out: the policy's chat template does not show them"),
    ),
}  # fmt: skip
