"""Says how the live version was seen to be served: by the trainer before agents got it, and by the proxy since."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.records import PolicyVersion
from ...store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How the live version was seen to be served; `story` says it to people.

    `deviations`: by how many standard deviations the servers' answers were those of the new weights and not of those
    before; null where that was not recorded. `difference`: how far they were from the trainer's own, in nats. `by`:
    what was compared where answers told nothing. `probed_at`: when the proxy last compared an answer with the
    version's first one (Unix time); `problem`: what was wrong.
    """

    version: int
    verified: bool
    deviations: float | None
    difference: float | None
    by: str | None
    probed_at: float | None
    problem: str | None

    story: str


async def verified(store: Store) -> Verified:
    """Read how the live version was verified, and when it was last probed."""
    live = await store.versions.live()
    step, probed = await store.steps.of_version(live.version), await store.probes.of(live.version)
    found = step.metrics if step is not None and step.metrics.get("version") == live.version else {}
    deviations, by = found.get("verify_deviations"), found.get("verified_by")
    return Verified(
        version=live.version,
        verified=live.verified,
        deviations=deviations,
        difference=found.get("verify_difference"),
        by=by,
        probed_at=None if probed is None else probed.at,
        problem=None if probed is None else probed.problem,
        story=_story(live, deviations, by),
    )


def _story(live: PolicyVersion, deviations: float | None, by: str | None) -> str:
    if live.version == 0:
        return "the base model: there is nothing to verify"
    if not live.verified:
        return "not verified yet: merged weights on a single server are compared once they answer agents"
    if by is not None:
        return f"by {by} alone: answers did not tell new weights from old"
    if deviations is None:
        return "it was verified; how clearly is not recorded"
    return f"the new weights are {deviations:.3g} standard deviations from the old"
