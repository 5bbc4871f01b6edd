"""`--budget`: begins no further rollouts once those of a run have cost so much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import LightningError
from ..api_client import ApiClient

Json = Mapping[str, Any]


class OverBudget(LightningError):
    """A run stopped before its last task: what was begun has ended, and nothing further began."""

    exit_code = 3


class Budget:
    """USD that a run may cost: the calls of its rollouts, and what rewarders spend meanwhile. None: any amount."""

    def __init__(self, usd: float | None) -> None:
        self._most = usd
        self._calls, self._rewarders, self._before = 0.0, 0.0, 0.0
        self._unpriced = 0
        self.left_out = False  # tasks

    @property
    def spent(self) -> float:
        """Return the USD spent so far."""
        return self._calls + self._rewarders

    @property
    def is_spent(self) -> bool:
        """Return whether nothing further may begin: also where the cost of calls that ended well is not known."""
        return self._most is not None and (self.spent >= self._most or self._unpriced > 0)

    async def begin(self, api: ApiClient, earlier: float = 0.0) -> None:
        """Note what rewarders have spent before this run. `earlier`: what the run that is resumed has cost."""
        if self._most is not None:
            self._calls, self._before = earlier, await _of_rewarders(api)

    async def count(self, api: ApiClient, rollout: Json) -> None:
        """Count a rollout that has ended."""
        costs = rollout.get("costs")
        if self._most is None or costs is None:
            return
        self._calls += costs["usd"]
        ended_well = (call["call_id"] for call in rollout["calls"] if call["status"] == "ok")
        self._unpriced += costs["unpriced"] + sum(costs["of_calls"][call_id]["unknown"] for call_id in ended_well)
        self._rewarders = await _of_rewarders(api) - self._before

    def summary(self) -> dict[str, float]:
        """Return what to add to the summary of a run, as JSON."""
        return {} if self._most is None else {"usd": self.spent}

    def line(self) -> str | None:
        """Return what was spent, for a person; None without a budget."""
        return None if self._most is None else f"{self.spent:.4g} of {self._most:g} USD spent"

    def require(self) -> None:
        """Raise OverBudget if tasks were left out."""
        if self.left_out and self._unpriced:
            raise OverBudget(
                f"--budget: {self._unpriced} calls have no known cost (`lightning-proxy costs --by model`): give the "
                f"model a price in `prices`. No further rollouts were begun; {self.spent:.4g} USD are known to be spent"
            )
        if self.left_out:
            raise OverBudget(
                f"--budget: {self.spent:.4g} of {self._most:g} USD are spent. No further rollouts were begun"
            )


async def _of_rewarders(api: ApiClient) -> float:
    status = await api.request("GET", "/status")
    return float(sum(one["usd"] for one in status.get("spent", [])))
