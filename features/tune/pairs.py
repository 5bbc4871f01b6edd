"""Chooses pairs of siblings to learn preferences from, of which one got clearly more reward.

The two answers of a pair follow the same prompt, token by token, for DPO compares answers to one prompt
(https://arxiv.org/abs/2305.18290). Of a rollout with several rows the first counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from ...trainer.report.batch_metrics import Seen
from ...trainer.types import Sample
from .lessons import Lessons, lessons_of
from .reader import SampledReader
from .rollouts import NothingToLearn, RewardedRollout, what_was_left_out


class Pair(NamedTuple):
    """The rows of two siblings with the same prompt; `chosen` got more reward than `rejected`."""

    chosen: Sample
    rejected: Sample


Pairs = Lessons[Pair]


class PairReader(SampledReader):
    """Reads pairs from the store."""

    async def read(self, among: Collection[str] | None = None) -> Pairs:
        """Return the pairs of each task, of all rollouts or `among` these. Raises NothingToLearn without any.

        Rewards differ by `dpo.margin` at least. At most `dpo.pairs_per_task` of a task are taken: of rollouts that are
        in the fewest pairs yet, and among these those that differ most.
        """
        seen = Seen()
        tasks: dict[str, list[RewardedRollout]] = {}
        for one in await self._rollouts.rewarded(among, seen):
            if one.rollout.task_id is not None:
                tasks.setdefault(one.siblings, []).append(one)
        differing = {task: of_task for task, of_task in tasks.items() if self._differ(of_task)}
        if not differing:
            raise NothingToLearn(
                f"nothing to prefer: in none of {len(tasks)} tasks do two rewarded rollouts differ by "
                f"{self._dpo.margin:g} or more (tune.dpo.margin)"
            )
        ordered = self._rollouts.in_order(differing)
        found = [pairs for task in ordered if (pairs := await self._of_task(differing[task], seen))]
        if not found:
            others = seen.counts["pairs_other_prompt"]
            reasons = [f"{others} pairs of different prompts" if others else "", what_was_left_out(seen)]
            raise NothingToLearn(
                f"nothing to prefer: the rewards of {len(differing)} tasks differ, and no two of their rollouts make a "
                f"pair: {', '.join(filter(None, reasons)) or 'their answers are the same'}"
            )
        chosen = lessons_of(found, self._dpo.held_out, seen)
        counts = {
            "pairs": float(len(chosen.train)),
            "pairs_held_out": float(len(chosen.held_out)),
            "pairs_other_prompt": float(seen.counts["pairs_other_prompt"]),
        }
        return replace(chosen, metrics=chosen.metrics | counts)

    def _differ(self, rollouts: Sequence[RewardedRollout]) -> bool:
        rewards = [one.reward for one in rollouts]
        return max(rewards) - min(rewards) >= self._dpo.margin

    async def _of_task(self, rollouts: Sequence[RewardedRollout], seen: Seen) -> list[Pair]:
        rows = [(one.reward, made[0]) for one in rollouts if (made := await self._rollouts.rows(one.rollout, seen))]
        ranked = sorted(rows, key=lambda row: -row[0])
        apart = [(a[0] - b[0], Pair(a[1], b[1])) for a, b in combinations(ranked, 2)]
        widest = sorted((one for one in apart if one[0] >= self._dpo.margin), key=lambda one: -one[0])
        distinct: dict[Any, Pair] = {}
        for _, pair in widest:
            if pair.chosen.token_ids != pair.rejected.token_ids:
                distinct.setdefault((pair.chosen.token_ids, pair.rejected.token_ids), pair)
        candidates = [pair for pair in distinct.values() if _same_prompt(pair)]
        seen.counts["pairs_other_prompt"] += len(distinct) - len(candidates)
        return self._least_used(candidates)

    def _least_used(self, candidates: list[Pair]) -> list[Pair]:
        """Up to `dpo.pairs_per_task` of them, each time one whose rollouts are in the fewest pairs yet."""
        used: Counter[str] = Counter()
        found: list[Pair] = []
        while candidates and len(found) < self._dpo.pairs_per_task:
            pair = min(candidates, key=lambda p: used[p.chosen.rollout_id] + used[p.rejected.rollout_id])
            candidates.remove(pair)
            used.update([pair.chosen.rollout_id, pair.rejected.rollout_id])
            found.append(pair)
        return found


def _same_prompt(pair: Pair) -> bool:
    first, second = (sample.token_ids[: sample.mask.index(1)] for sample in pair)
    return first == second
