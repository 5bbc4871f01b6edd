"""Decides which calls of a rollout are trained on, by what became of their answers. Pure.

A rollout of advantage 0.5: a first answer that was rejected, the answer to the same request that was used, and a
summary that a later prompt has in place of the history.

    call                   rejected, summary    returned, advantage
    0 rejected             leave_out            none: it is left out
                           negative             1.0, -0.5
                           as_others            1.0, +0.5
    1 used in its place                         1.0, +0.5
    2 summary              train                1.0, +0.5: the return of what comes after it
                           leave_out            none: it is left out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...proxy.contexts.calls import graph_of
from ...proxy.contexts.config import ContextKeys
from ...proxy.types import ModelCall
from ..credit.strategies import Credited


def sifted(
    config: ContextKeys, calls: Sequence[ModelCall], credit: Sequence[Credited | None]
) -> tuple[list[Credited | None], Counter[str]]:
    """Return the credit that the calls are trained with, None for those that are left out, and counts of both kinds."""
    if (graph := graph_of(calls)) is None:
        return [*credit], Counter()
    rejected, summaries = graph.rejected(), graph.summaries()
    left_out = (rejected if config.rejected == "leave_out" else set()) | (
        summaries if config.summaries == "leave_out" else set()
    )
    found = [None if place in left_out else one for place, one in enumerate(credit)]
    for place in rejected if config.rejected == "negative" else ():
        one = found[place]
        found[place] = one and one._replace(advantage=-abs(one.advantage))
    return found, Counter(calls_rejected=len(rejected), calls_summaries=len(summaries))
