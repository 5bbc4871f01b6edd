"""For agents that want to say more than their calls do: which rollout they are in, rewards, states, other actions.

Nothing here is needed to be recorded or trained. It imports no package that the agent does not have anyway.
"""

from .emit import emit_action, emit_note, emit_reward, emit_state
from .errors import ClientError, NoRollout, ProxyUnreachable, Refused
from .follow import event_hooks, follow
from .scope import Rollout, agent, current, rollout

__all__ = [
    "ClientError",
    "NoRollout",
    "ProxyUnreachable",
    "Refused",
    "Rollout",
    "agent",
    "current",
    "emit_action",
    "emit_note",
    "emit_reward",
    "emit_state",
    "event_hooks",
    "follow",
    "rollout",
]
