"""Runs held-out tasks with one model after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.errors import ConfigError, LightningError
from ..api_client import ApiClient, ApiError
from ..run.limits import BacklogGate
from ..run.run import RolloutResult, RunOptions, run_tasks
from ..run.runner import Runner
from ..run.tasks import Task

LIVE = "live"


@dataclass(frozen=True, slots=True)
class Model:
    """The model that answers one row's rollouts: `live`, a policy version, or any model by its name."""

    name: str

    @property
    def version(self) -> int | None:
        return int(self.name) if self.name.isascii() and self.name.isdigit() else None

    @property
    def choice(self) -> dict[str, Any]:
        """Return the fields of `POST /rollouts` that choose this model."""
        if self.name == LIVE:
            return {}
        return {"model": self.name} if self.version is None else {"policy_version": self.version}


@dataclass(slots=True)
class EvalRow:
    """One model and its results so far."""

    model: Model
    results: list[RolloutResult] = field(default_factory=list)
    complete: bool = False


def parse_models(text: str) -> list[Model]:
    """Parse `live,0,5,gpt-4o-mini`; `base` is version 0. ConfigError for an empty or repeated name."""
    names = [name.strip() for name in text.split(",")]
    names = ["0" if name == "base" else name for name in names]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"--models: names separated by commas, each once, got {text!r}")
    return [Model(name) for name in names]


class Evaluation:
    """Runs every row in turn. `rows` holds the results so far."""

    def __init__(
        self,
        api: ApiClient,
        runner: Runner,
        options: RunOptions,
        models: Sequence[Model],
        *,
        promote: bool,
        say: Callable[[str], None],
        gate: BacklogGate | None = None,
    ) -> None:
        self._api, self._runner, self._options, self._gate = api, runner, options, gate
        self._promote, self._say = promote, say
        self.rows = [EvalRow(model) for model in models]
        self._before = self._live = 0  # the versions that were live when it began, and that are now
        self._alias = ""

    async def run(self, tasks: Sequence[Task], on_result: Callable[[EvalRow, RolloutResult], None]) -> None:
        """Run all tasks, one row after another: vLLM on a CPU mixes up base model and adapters that share a batch.

        Raises before anything starts if a model cannot answer, and at once if another model answered. However it ends,
        the results are in `rows`, and the version that was live before is live again.
        """
        await self._check()
        async with self._live_again():
            for row in self.rows:
                await self._put_live(row.model)
                options = replace(self._options, mode="eval", choice=row.model.choice)
                await run_tasks(self._api, tasks, self._runner, options, self._taking(row, on_result), self._gate)
                row.complete = True

    async def _check(self) -> None:
        """Check that each model can answer: open 0 rollouts with it, or look up the version to promote."""
        policy = await self._api.policy()
        self._before = self._live = int(policy["live_version"])
        self._alias = policy["alias"]
        self._promote = self._promote and policy["publish"] == "merged"
        if not self._promote:
            for row in self.rows:
                await self._api.open_rollouts("eval", "eval", 0, **row.model.choice)
            return
        known = {v["version"]: v for v in (await self._api.request("GET", "/policy/versions"))["data"]}
        for row in self.rows:
            if (needed := row.model.version) is not None:
                _check_promotable(needed, known.get(needed))
            elif row.model.name != LIVE:
                await self._api.open_rollouts("eval", "eval", 0, **row.model.choice)

    async def _put_live(self, model: Model) -> None:
        needed = self._before if model.name == LIVE else model.version
        if self._promote and needed is not None and needed != self._live:
            self._say(f"making policy version {needed} live; version {self._before} will be live again at the end")
            self._live = needed  # even if the next line is cut short, it may be live by then
            await self._make_live(needed)

    async def _make_live(self, version: int) -> None:
        await self._api.request("POST", "/policy/promote", {"version": version})

    @asynccontextmanager
    async def _live_again(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if self._live != self._before:
                await asyncio.shield(self._restore())

    async def _restore(self) -> None:
        try:
            await self._make_live(self._before)
            self._say(f"policy version {self._before} is live again")
        except ApiError as error:
            again = f"lightning-proxy policy promote {self._before}"
            raise LightningError(f"version {self._before} is not live again: {error.message}; try `{again}`") from None

    def _taking(
        self, row: EvalRow, on_result: Callable[[EvalRow, RolloutResult], None]
    ) -> Callable[[RolloutResult], None]:
        def take(result: RolloutResult) -> None:
            _check_answered_by(row.model, result, self._alias)
            if versions := result.answers.get(self._alias):  # calls for other models are not evaluated
                result = replace(result, answers={self._alias: versions})
            row.results.append(result)
            on_result(row, result)

        return take


def _check_promotable(number: int, version: dict[str, Any] | None) -> None:
    if version is None:
        raise LightningError(f"no policy version {number}")
    if number and (version["path"] is None or version["status"] not in ("ready", "live")):
        raise LightningError(f"policy version {number} is {version['status']} and has no files to serve")


def _check_answered_by(model: Model, result: RolloutResult, alias: str) -> None:
    """Raise if another model answered: the agent asked for it by name, or the live version changed.

    Calls for other models beside those for the alias are fine: they belong to agents that are not trained.
    """
    if model.name == LIVE or not result.answers:
        return
    wanted, wrong = model.version, f"rollout {result.rollout_id} should be answered by "
    if wanted is None:
        if alias not in result.answers:
            names = ", ".join(sorted(map(str, result.answers)))
            raise LightningError(f"{wrong}{model.name}, but its agent never asked for {alias!r}, only for {names}")
        return
    others = sorted(set(result.answers.get(alias) or result.policy_versions) - {wanted}, key=str)
    if others:
        raise LightningError(
            f"{wrong}policy version {wanted}, but was answered by "
            f"{', '.join('another model' if v is None else f'version {v}' for v in others)}. The agent must ask for "
            "the policy's alias, and with policy.publish: merged no trainer may publish during an evaluation"
        )
