"""The further metrics of a step with a teacher: name, unit and meaning, by group."""

from __future__ import annotations

GROUPS = {
    "guides": (
        ("guided_share", "share", "trained tokens that a guide spoke of"),
        ("guide_advantage", "1", "size of what guides add to a token's advantage; mean over guided tokens"),
        ("guide_kl", "nats", "KL divergence of the policy from its guides: mean over guided tokens (estimator k1)"),
        ("calls_taught", "count", "calls that the teacher scored"),
        ("teacher_tokens", "count", "tokens that the teacher read and sampled"),
        (
            "calls_not_plain",
            "count",
            "calls that the teacher cannot score: not sampled at temperature 1 and nothing else",
        ),
        ("calls_beyond_teacher", "count", "calls that begin beyond the teacher's longest row"),
        ("guide_s", "s", "asking the guide, before `step_s`"),
    ),
}  # fmt: skip
