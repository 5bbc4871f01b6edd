"""Selects the agents to train (`trainer.agents`), and warns about configured names that no call has had."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ...core.records import ModelCall

log = logging.getLogger(__name__)

OTHERS = "*"  # every agent that is not named, and calls that name none
NO_NAME = "no name (calls without X-Agent-Name)"


class TrainedAgents:
    """The agents that are trained: those that `configured` names or, if it is None, all of them, treated as one."""

    def __init__(self, configured: Sequence[str] | None) -> None:
        self._trained = (OTHERS,) if configured is None else tuple(configured)

    @property
    def named(self) -> tuple[str, ...]:
        """Return the names of the agents that are trained separately."""
        return tuple(name for name in self._trained if name != OTHERS)

    def role(self, agent: str | None) -> str | None:
        """Return the agent's name if it is trained by name, `*` if it is trained with all others, or else None."""
        if agent in self._trained:
            return agent
        return OTHERS if OTHERS in self._trained else None


class RollCall:
    """Warns once about each configured agent that has made no call: its name may be misspelt.

    `others`: agents named in other options, by option.
    """

    def __init__(self, agents: TrainedAgents, others: Mapping[str, Collection[str]] = MappingProxyType({})) -> None:
        self._agents, self._others = agents, others
        self._seen, self._missed = set[str](), set[tuple[str, str]]()

    def look(self, rollouts: Iterable[Sequence[ModelCall]]) -> None:
        """Note the agents of these calls. Warn about configured agents that are missing while others were seen."""
        self._seen |= {call.agent or NO_NAME for calls in rollouts for call in calls}
        trains_all = all(map(self._agents.role, self._seen))
        for option, named in {"trainer.agents": () if trains_all else self._agents.named, **self._others}.items():
            missing = {(option, name) for name in named if name not in self._seen}
            if self._seen.difference(named) and missing - self._missed:
                self._missed |= missing
                nothing = ", so nothing is trained for them" if option == "trainer.agents" else ""
                log.warning(
                    "%s: there are no calls by %s so far%s; agents seen: %s",
                    option, ", ".join(sorted(name for _, name in missing)), nothing, ", ".join(sorted(self._seen)),
                )  # fmt: skip
