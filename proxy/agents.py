"""Which agents are trained, and which policy answers each: `trainer.agents`, looked up by agent name. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DEFAULT_POLICY = "default"
OTHERS = "*"  # every agent that is not named, and calls that name none


class Agents:
    """None: all agents train the default policy. A list: these train it. A mapping: agent -> policy."""

    def __init__(self, configured: Sequence[str] | Mapping[str, str] | None) -> None:
        if configured is None:
            configured = [OTHERS]
        if not isinstance(configured, Mapping):
            configured = dict.fromkeys(configured, DEFAULT_POLICY)
        self._policies = dict(configured)

    @property
    def named(self) -> tuple[str, ...]:
        """The agents that are trained, by their names."""
        return tuple(name for name in self._policies if name != OTHERS)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that are trained, in the order in which they are first named."""
        return tuple(dict.fromkeys(self._policies.values()))

    def role(self, agent: str | None) -> str | None:
        """What a call of this agent counts as: the agent's own name, `*`, or None where it is not trained."""
        if agent in self._policies:
            return agent
        return OTHERS if OTHERS in self._policies else None

    def policy(self, agent: str | None) -> str:
        """The policy that answers this agent; the default one also answers those that are not trained."""
        return self._policies.get(self.role(agent) or "", DEFAULT_POLICY)

    def trained_by(self, agent: str | None) -> str | None:
        """The policy that calls of this agent train; None if they train none."""
        return None if self.role(agent) is None else self.policy(agent)
