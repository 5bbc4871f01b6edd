"""Recorded calls as the trainer reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_proxy.core.json_text import dumps
from lightning_proxy.core.records import ModelCall
from lightning_proxy.store.requests import Parent, full_calls, short_calls, shrink_request


def call(call_id: str, agent: str | None = None, prompt: tuple[int, ...] = (), **changed: Any) -> ModelCall:
    made = ModelCall(
        call_id=call_id, rollout_id="r", seq=0, agent=agent, endpoint="chat/completions", status="ok", model="policy",
        policy_version=0, policy_versions=(0,), request={}, response={}, prompt_token_ids=prompt, choices=(),
        usage=None, tool_calls=(), reward=None, trainable=True, untrainable_reason=None, error=None, http_status=200,
        upstream=None, extends=None, superseded_by=None, started_at=0.0, ttft_ms=None, latency_ms=None,
    )  # fmt: skip
    return replace(made, **changed)


def stored_and_read(request: dict[str, Any], parent: dict[str, Any]) -> dict[str, Any]:
    """The request of a call read back after it was stored as the difference from its parent's."""
    known = {"parent": Parent(parent, b"")}
    row = dict.fromkeys(("prompt_ids", "token_ids")) | {"call_id": "call", "parent_id": "parent", "prompt_shared": 0}
    short = short_calls([row | {"request": dumps(shrink_request(request, parent))}], known)
    made: dict[str, Any] = full_calls(short, known)[0]["request"]
    return made


# One answered call of a rollout, which has none yet, by a version of the policy.
ANSWERED = """
INSERT INTO calls (call_id, rollout_id, seq, endpoint, status, policy_version, started_at, request)
VALUES (:rollout_id, :rollout_id, 0, 'chat/completions', 'ok', :version, 1, '{}')
"""
