"""For agents that want to say more than their calls do: which rollout they are in, rewards, states, other actions.

Nothing here is needed to be recorded or trained. It imports no package that the agent does not have anyway.
"""

from lightning_proxy.client.emit import emit_action, emit_note, emit_reward, emit_state
from lightning_proxy.client.errors import ClientError, NoRollout, ProxyUnreachable, Refused
from lightning_proxy.client.follow import event_hooks, follow
from lightning_proxy.client.scope import Rollout, agent, current, rollout

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
