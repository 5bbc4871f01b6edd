"""`eval`: held-out tasks, answered by one model after another, each rollout opened for its model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ...proxy.errors import ConfigError, InvalidRequest, LightningError
from ...proxy.power.chat import power_of
from ..api_client import ApiClient, ApiError
from ..run.programs import Runner
from ..run.run import RolloutResult, RunOptions, run_tasks
from ..run.tasks import Task

LIVE = "live"


@dataclass(frozen=True, slots=True)
class Model:
    """What answers the rollouts of one row: the live version, a policy version, or any model by its name."""

    name: str

    @property
    def version(self) -> int | None:
        return int(self.name) if self.name.isascii() and self.name.isdigit() else None

    @property
    def needs(self) -> int | None:
        """The version that has to be live where versions are not served side by side; None: whichever was."""
        return 0 if self.version is None and power_of(self.name) is not None else self.version

    @property
    def choice(self) -> dict[str, Any]:
        """What it adds to `POST /rollouts`."""
        if self.name == LIVE:
            return {}
        return {"model": self.name} if self.version is None else {"policy_version": self.version}


@dataclass(slots=True)
class Row:
    """One model's results, as they come."""

    model: Model
    results: list[RolloutResult] = field(default_factory=list)
    complete: bool = False


def parse_models(text: str) -> list[Model]:
    """`live,0,5,gpt-4o-mini,power:4`; ConfigError for none, an empty one or one named twice. `base` is version 0."""
    names = [name.strip() for name in text.split(",")]
    names = ["0" if name == "base" else name for name in names]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"--models: names between commas, each once, got {text!r}")
    for name in names:
        try:
            power_of(name)
        except InvalidRequest as error:
            raise ConfigError(f"--models: {error.message}") from None
    return [Model(name) for name in names]


class Evaluation:
    """Runs every row in turn; `rows` is what there is so far."""

    def __init__(
        self,
        api: ApiClient,
        runner: Runner,
        options: RunOptions,
        models: Sequence[Model],
        *,
        promote: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._api, self._runner, self._options = api, runner, options
        self._promote, self._say = promote, say
        self.rows = [Row(model) for model in models]
        self._before = self._live = 0  # versions: live when it began, and now
        self._alias = ""

    async def run(self, tasks: Sequence[Task], on_result: Callable[[Row, RolloutResult], None]) -> None:
        """All tasks, a row at a time: vLLM on a CPU mixes up base model and adapters that share a batch.

        Raises before anything starts if a model cannot answer, and at once if another one did. Whatever it raises, and
        cancelled, what has ended is in `rows`, and the version that was live is live again.
        """
        await self._check()
        async with self._live_again():
            for row in self.rows:
                await self._put_live(row.model)
                await run_tasks(self._api, tasks, self._runner, self._options_of(row), self._taking(row, on_result))
                row.complete = True

    async def _check(self) -> None:
        """Ask for no rollout of each model; versions that are promoted in turn are looked up."""
        policy = await self._api.policy()
        self._before = self._live = int(policy["live_version"])
        self._alias = policy["alias"]
        self._promote = self._promote and policy["publish"] == "merged"
        if not self._promote:
            for row in self.rows:
                await self._api.open_rollouts("eval", "eval", 0, **row.model.choice)
                _check_base_is_served(row.model, policy)
            return
        known = {v["version"]: v for v in (await self._api.request("GET", "/policy/versions"))["data"]}
        for row in self.rows:
            if (needed := row.model.needs) is not None:
                _check_promotable(needed, known.get(needed))
            elif row.model.name != LIVE:
                await self._api.open_rollouts("eval", "eval", 0, **row.model.choice)

    async def _put_live(self, model: Model) -> None:
        needed = self._before if model.name == LIVE else model.needs
        if self._promote and needed is not None and needed != self._live:
            self._say(f"policy version {needed} is made live; {self._before} was, and will be again")
            self._live = needed  # from here on it may be: also if what follows is cut short
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

    def _options_of(self, row: Row) -> RunOptions:
        o = self._options
        return RunOptions(o.group_size, o.concurrency, "eval", o.logs, row.model.choice)

    def _taking(self, row: Row, on_result: Callable[[Row, RolloutResult], None]) -> Callable[[RolloutResult], None]:
        def take(result: RolloutResult) -> None:
            _check_answered_by(row.model, result, self._alias)
            if asked := result.answers.get(self._alias):  # what other names stand for is not what is evaluated
                result = replace(result, answers={self._alias: asked})
            row.results.append(result)
            on_result(row, result)

        return take


def _check_base_is_served(model: Model, policy: dict[str, Any]) -> None:
    """Power sampling needs the base model, in whose place merged weights may be served."""
    if model.version is None and model.needs == 0 and policy["publish"] == "merged" and policy["live_version"]:
        raise LightningError(
            f"{model.name} samples from the base model, and policy version {policy['live_version']} is served in its "
            "place: `--promote` makes version 0 live meanwhile"
        )


def _check_promotable(number: int, version: dict[str, Any] | None) -> None:
    if version is None:
        raise LightningError(f"no policy version {number}")
    if number and (version["path"] is None or version["status"] not in ("ready", "live")):
        raise LightningError(f"policy version {number} is {version['status']} and has no files to serve")


def _check_answered_by(model: Model, result: RolloutResult, alias: str) -> None:
    """A row must hold no other model's answers: of an agent that asks for it by name, or of a version that moved.

    Beside calls for the alias, calls for other models by their names are well: those of agents that are not trained.
    """
    if model.name == LIVE or not result.answers:
        return
    wanted, meant = model.version, f"rollout {result.rollout_id} is one for "
    if wanted is None:
        if alias not in result.answers:
            names = ", ".join(sorted(map(str, result.answers)))
            raise LightningError(f"{meant}{model.name}, and never asked for {alias!r} but for {names}")
        return
    others = sorted(set(result.answers.get(alias) or result.policy_versions) - {wanted}, key=str)
    if others:
        raise LightningError(
            f"{meant}policy version {wanted}, and was answered by "
            f"{', '.join('another model' if v is None else f'version {v}' for v in others)}: the agent has to ask for "
            "the policy's alias, and with policy.publish: merged no trainer may publish meanwhile"
        )
