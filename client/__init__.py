"""Lets an agent name its rollout and post rewards, states, actions and notes.

Agents are recorded and trained even without it. Importing it needs no other package except tenacity.
"""

from .control import answer
from .program import ClientError, NoRollout, ProxyUnreachable, Refused, task
from .scope import Rollout, agent, current, emit_action, emit_note, emit_reward, emit_state, follow, rollout

__all__ = [
    "ClientError", "NoRollout", "ProxyUnreachable", "Refused", "Rollout", "agent", "answer", "current", "emit_action",
    "emit_note", "emit_reward", "emit_state", "follow", "rollout", "task",
]  # fmt: skip
