"""Says so, once each, when `trainer.agents` names an agent that no rollout knows: a typo would train nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from lightning_proxy.proxy.agents import Agents
from lightning_proxy.proxy.types import ModelCall

log = logging.getLogger(__name__)

SHOWN = 10
NO_NAME = "no name (calls without X-Agent-Name)"


class RollCall:
    """Keeps the names that were seen among the calls of rollouts, and those that were missed."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._seen: set[str] = set()
        self._missed: set[str] = set()

    def look(self, rollouts: Iterable[Sequence[ModelCall]]) -> None:
        """Warn of agents that were never seen while calls of agents that are not trained were."""
        self._seen |= {call.agent or NO_NAME for calls in rollouts for call in calls}
        missing = set(self._agents.named) - self._seen
        if missing - self._missed and any(self._agents.role(name) is None for name in self._seen):
            self._missed |= missing
            log.warning(
                "trainer.agents: no call of %s so far, so nothing of it is trained; the agents of the rollouts are: %s",
                _listed(missing),
                _listed(self._seen),
            )


def _listed(names: set[str]) -> str:
    first = sorted(names)[:SHOWN]
    return ", ".join(first) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
