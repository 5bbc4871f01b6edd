"""Finds the agent of a call among the spans around it, which end after the call and may come in a later export."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .otlp import Span

MOST_SPANS = 20_000  # that are remembered, of all traces
MOST_WAITING = 1_000  # calls of a trace whose agent is not known yet
MOST_DEPTH = 100


class Around(NamedTuple):
    """A span's parent, and the agent that it names itself."""

    parent_id: str
    agent: str | None


@dataclass(slots=True)
class Trace:
    """The spans of a trace that have come, and its calls (rollout and call) that no known span names an agent for."""

    spans: dict[str, Around] = field(default_factory=dict)
    waiting: dict[str, tuple[str, str]] = field(default_factory=dict)

    def agent_of(self, span_id: str) -> str | None:
        """Return the agent that the span names, or else the nearest one around it."""
        for _ in range(MOST_DEPTH):
            around = self.spans.get(span_id)
            if around is None or around.agent is not None:
                return None if around is None else around.agent
            span_id = around.parent_id
        return None


class Agents:
    """Remembers the newest traces of each sender (`owner`): their spans, and the calls that wait for a name."""

    def __init__(self) -> None:
        self._traces: OrderedDict[tuple[object, str], Trace] = OrderedDict()
        self._spans = 0

    def tell(self, owner: object, span: Span, agent: str | None) -> None:
        """Remember a span, and forget the oldest traces."""
        trace = self._traces.setdefault((owner, span.trace_id), Trace())
        self._traces.move_to_end((owner, span.trace_id))
        self._spans += span.span_id not in trace.spans
        trace.spans[span.span_id] = Around(span.parent_id, agent)
        while self._spans > MOST_SPANS:
            _, oldest = self._traces.popitem(last=False)
            self._spans -= len(oldest.spans)

    def agent_of(self, owner: object, trace_id: str, span_id: str) -> str | None:
        """Return the agent of a span as far as its trace is known."""
        trace = self._traces.get((owner, trace_id))
        return None if trace is None else trace.agent_of(span_id)

    def wait(self, owner: object, trace_id: str, span_id: str, rollout_id: str, call_id: str) -> None:
        """Let a recorded call wait for the name of its agent."""
        trace = self._traces.get((owner, trace_id))
        if trace is not None and len(trace.waiting) < MOST_WAITING:
            trace.waiting[span_id] = (rollout_id, call_id)

    def found(self, owner: object, trace_ids: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """Yield rollout, call and agent of the calls in these traces that need wait no longer."""
        for trace_id in trace_ids:
            trace = self._traces.get((owner, trace_id), Trace())
            for span_id, call in [*trace.waiting.items()]:
                if (agent := trace.agent_of(span_id)) is not None:
                    del trace.waiting[span_id]
                    yield (*call, agent)
