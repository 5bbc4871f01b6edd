"""Recorded calls as the trainer reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_proxy.core.records import ModelCall


def call(call_id: str, agent: str | None = None, prompt: tuple[int, ...] = (), **changed: Any) -> ModelCall:
    made = ModelCall(
        call_id, "r", 0, agent, "chat.completions", "ok", "policy", 0, (0,), {}, {}, prompt, (), None, (),
        None, True, None, None, 200, 0.0, None, None,
    )  # fmt: skip
    return replace(made, **changed)


# One answered call of a rollout, which has none yet, by a version of the policy.
ANSWERED = """
INSERT INTO calls (call_id, rollout_id, seq, endpoint, status, policy_version, started_at, request)
VALUES (:rollout_id, :rollout_id, 0, 'chat/completions', 'ok', :version, 1, '{}')
"""
