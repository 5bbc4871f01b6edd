"""Asks a rewarder about recorded rollouts, and posts its answers as rewards."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import IO, Any
from urllib.parse import quote

import typer

from ...commands.api_client import ApiClient, ApiError
from ...commands.formats import number, print_json, progress_bar
from ...commands.show.find import PAGE, checked, since_of
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.json_text import dumps_readable
from ...core.prices import Prices
from ...store.requests import full_calls
from .config import JudgeConfig
from .kinds import check, made, named
from .process import Function
from .rewarder import Away, Given, Rewarder, price_line, within
from .table import KeptAnswers

PATIENCE_S = 60.0
SHOWN = 5
GONE = 404
PRICED = 5  # groups whose questions are counted


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line. `failed`: a results file; only its failed rollouts are scored again."""

    filters: dict[str, Any]
    rewarder: str = "function"
    failed: Path | None = None
    out: Path | None = None
    again: bool = False
    force: bool = False
    retrain: bool = False


@dataclass(slots=True)
class Outcome:
    """The result: the rollouts that were scored, and how many had this version's reward before."""

    scored: list[RescoredRollout] = field(default_factory=list)
    there_before: int = 0


def rescore_command(config: Config, options: Options, *, as_json: bool) -> None:
    """Run the command. Raise ConfigError for a wrong option; exit with 1 if the rewarder failed."""
    if options.rewarder == "function" and config.rewards.function is None:
        raise ConfigError("name the reward function: --reward FILE.py:NAME, or rewards.function")
    checked(options.filters["mode"], None)
    outcome, finished = Outcome(), False
    try:
        run_until_signal(_run(config, options, outcome))
        finished = True
    finally:
        if finished or outcome.scored:
            show(outcome.scored, outcome.there_before, config.trainer.reward_weights, as_json=as_json)
    if any(one.error is not None for one in outcome.scored):
        raise typer.Exit(1)


async def _run(config: Config, options: Options, outcome: Outcome) -> None:
    async with opened(config, options.rewarder) as (rewarder, _):
        try:
            if isinstance(rewarder, Function):
                await _require(config, rewarder, force=options.force)
            with ResultFile(options.out) as results:
                async with ApiClient.of(config, patience_s=PATIENCE_S) as api:
                    await _Work(config, options, api, rewarder, outcome, results.add).run()
        except Away as error:
            what = config.rewards.function if isinstance(rewarder, Function) else rewarder.label
            raise ConfigError(f"{what}: {error}") from None


async def _require(config: Config, function: Function, *, force: bool) -> None:
    """Raise ConfigError if the function does not declare that it needs the record alone; Away."""
    if not (await function.load()).from_record and not force:
        name = config.rewards.name
        raise ConfigError(
            f"{config.rewards.function} does not say that it needs the record alone: write `{name}.from_record = True` "
            "below it if it looks at nothing that has changed since, or give --force"
        )


class _Work:
    """One run: lists the rollouts, scores each, and posts the rewards."""

    def __init__(
        self,
        config: Config,
        options: Options,
        api: ApiClient,
        rewarder: Rewarder,
        outcome: Outcome,
        on_scored: Callable[[RescoredRollout], None],
    ) -> None:
        self._rewards = config.rewards
        self._rewarder = rewarder
        self._options = options
        self._api = api
        self._outcome = outcome
        self._on_scored = on_scored

    async def run(self) -> None:
        groups = await self._groups()
        await say_price(self._api, self._rewarder, groups)
        with progress_bar() as progress:
            bar = progress.add_task("rollouts", total=sum(map(len, groups)))
            left = iter(groups)

            async def worker() -> None:
                for group in left:
                    await self._score_together(group)
                    progress.advance(bar, len(group))

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._rewarder.at_once):
                        workers.create_task(worker())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _groups(self) -> list[list[str]]:
        """Ids of rollouts whose rewards are posted together: those of a task where they are compared, or retrained.

        With `retrain`, so that none is early.
        """
        wanted = None if self._options.failed is None else failed_in(self._options.failed)
        tasks: dict[str, list[str]] = defaultdict(list)
        alone: list[list[str]] = []
        filters = self._options.filters | {"since": since_of(self._options.filters["since"]), "status": "completed"}
        async with aclosing(self._api.every_rollout(PAGE, **filters)) as rollouts:
            async for rollout in rollouts:
                rollout_id, task = rollout["rollout_id"], rollout["task_id"]
                if wanted is not None and rollout_id not in wanted:
                    continue
                if (self._options.retrain or self._rewarder.in_groups) and task is not None:
                    tasks[task].append(rollout_id)
                else:
                    alone.append([rollout_id])
        return [*tasks.values(), *alone]

    async def _score_together(self, group: list[str]) -> None:
        parts = [group] if self._rewarder.in_groups else [[rollout_id] for rollout_id in group]
        scored = [one for part in parts for one in await self._score(part)]
        posts = [
            {"rollout_id": one.rollout_id, "call_id": score.call_id, "name": score.name or self._rewarder.name,
             "reward": score.value, "source": given.source, "comment": score.comment, "final": False,
             "retrain": self._options.retrain}
            for one, given in scored for score in given.scores
        ]  # fmt: skip
        if posts:
            await self._api.request("POST", "/reward", posts)
        for one, _ in scored:
            self._outcome.scored.append(one)
            self._on_scored(one)

    async def _score(self, rollout_ids: list[str]) -> list[tuple[RescoredRollout, Given]]:
        """What rollouts are given; nothing for those that have this version's rewards already, or were deleted."""
        rollouts, source = await read_rollouts(self._api, rollout_ids), await self._rewarder.source()
        known = {one["rollout_id"] for one in rollouts if any(r["source"] == source for r in one["rewards"])}
        if self._options.again:
            known = set()
        self._outcome.there_before += len(known)
        if len(known) == len(rollouts):
            return []
        found = []
        for rollout, unchecked in zip(rollouts, await self._rewarder.reward(rollouts), strict=True):
            if rollout["rollout_id"] not in known:
                given = within(unchecked, self._rewarder.name, self._rewards)
                before = {one["name"]: one["reward"] for one in rollout["rewards"] if one["call_id"] is None}
                values: dict[str, float] = defaultdict(float)
                for score in given.scores:
                    values[score.name or self._rewarder.name] += score.value
                one = RescoredRollout(
                    rollout["rollout_id"], rollout["task_id"], before, dict(values), given.source, given.error
                )
                found.append((one, given))
        return found


@dataclass(frozen=True, slots=True)
class RescoredRollout:
    """A rollout: its rewards `before` and the new `values`, by name; or the `error` that the function ended with."""

    rollout_id: str
    task_id: str | None
    before: dict[str, float]
    values: dict[str, float]
    source: str
    error: str | None


class ResultFile:
    """`with ResultFile(path) as results:` appends a line for each rollout at once; without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> ResultFile:
        if self._path is not None:
            try:
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, scored: RescoredRollout) -> None:
        if self._file is not None:
            self._file.write(dumps_readable(asdict(scored)) + "\n")
            self._file.flush()


def failed_in(path: Path) -> set[str]:
    """Return the rollouts whose last line in a results file has an error. Raise ConfigError if it is no such file."""
    errors: dict[str, str | None] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    for n, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            errors[found["rollout_id"]] = found["error"]
        except (ValueError, KeyError, TypeError):
            if n == len(lines):  # cut off when the command was killed
                continue
            raise ConfigError(f"{path}:{n}: no line of `rescore --out`") from None
    return {rollout_id for rollout_id, error in errors.items() if error is not None}


@dataclass(frozen=True, slots=True)
class Change:
    """One reward's name: how many rollouts got it, how it compares with their old values, and both means.

    `mean_before` is over the rollouts that had one.
    """

    name: str
    rollouts: int
    new: int
    higher: int
    lower: int
    same: int
    mean_before: float | None
    mean_after: float


def changes(scored: Sequence[RescoredRollout]) -> list[Change]:
    """Return the changes by the reward's name."""
    names = sorted({name for one in scored for name in one.values})
    return [_change(name, [(one.before.get(name), one.values[name]) for one in scored if name in one.values])
            for name in names]  # fmt: skip


def _change(name: str, pairs: Sequence[tuple[float | None, float]]) -> Change:
    known = [(before, after) for before, after in pairs if before is not None]
    higher, lower = sum(after > before for before, after in known), sum(after < before for before, after in known)
    return Change(
        name, len(pairs), new=len(pairs) - len(known), higher=higher, lower=lower, same=len(known) - higher - lower,
        mean_before=fmean(before for before, _ in known) if known else None,
        mean_after=fmean(after for _, after in pairs),
    )  # fmt: skip


def show(scored: Sequence[RescoredRollout], there_before: int, counted: Mapping[str, float], *, as_json: bool) -> None:
    """Print the summary. `counted`: the names that count in training."""
    found = changes(scored)
    failed = [one for one in scored if one.error is not None]
    silent = len(scored) - len(failed) - sum(bool(one.values) for one in scored)
    if as_json:
        counts: dict[str, Any] = {"asked": len(scored), "failed": len(failed), "without_reward": silent}
        print_json(counts | {"scored_before": there_before, "rewards": [asdict(change) for change in found]})
        return
    _print_table(found, scored)
    print(f"{len(scored)} rollouts asked about, {len(failed)} failed, {silent} without a reward, "
          f"{there_before} scored by this version before")  # fmt: skip
    for one in failed[:SHOWN]:
        typer.echo(f"lightning-proxy: no reward for rollout {one.rollout_id}: {one.error}", err=True)
    if len(failed) > SHOWN:
        typer.echo(f"lightning-proxy: and for {len(failed) - SHOWN} more", err=True)
    if found and not counted.keys() & {change.name for change in found}:
        names = " or ".join(change.name for change in found)
        typer.echo(f"lightning-proxy: {names} does not count in training, only {', '.join(counted)} does: name the "
                   "function so, or add the name to trainer.reward_weights", err=True)  # fmt: skip


def _print_table(found: Sequence[Change], scored: Sequence[RescoredRollout]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not found:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("reward", "rollouts", "new", "higher", "lower", "same", "mean before", "after"):
        table.add_column(heading, justify="left" if heading == "reward" else "right")
    for change in found:
        counts = map(str, (change.rollouts, change.new, change.higher, change.lower, change.same))
        table.add_row(change.name, *counts, number(change.mean_before), number(change.mean_after))
    console = Console()
    console.print(table)
    moved = sorted(
        (
            (abs(after - one.before[name]), one, name)
            for one in scored
            for name, after in one.values.items()
            if after != one.before.get(name, after)
        ),
        key=lambda move: -move[0],
    )
    for _, one, name in moved[:SHOWN]:
        line = f"{name} {number(one.before[name])} -> {number(one.values[name])}  rollout {one.rollout_id}"
        console.print(line + (f"  task {one.task_id}" if one.task_id else ""), markup=False, highlight=False)
    if len(moved) > SHOWN:
        console.print(f"and {len(moved) - SHOWN} more changed", highlight=False)


@asynccontextmanager
async def opened(
    config: Config, which: str, shuffle: str = "", answers: KeptAnswers | None = None
) -> AsyncIterator[tuple[Rewarder, KeptAnswers]]:
    """Yield a rewarder of the configuration, and what its model has used in this run. Raise ConfigError.

    With `answers` of another one, both have one budget.
    """
    if which != "function":
        await check(config)
    name, one = named(config, which)
    answers = answers or KeptAnswers(name, one, config.section(JudgeConfig).budget, Prices(config.prices))
    rewarder = made(name, one, config, answers, shuffle)
    try:
        yield rewarder, answers
    finally:
        await rewarder.close()


async def read_rollouts(api: ApiClient, rollout_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return rollouts with full requests, without those that were deleted."""
    found = []
    for rollout_id in rollout_ids:
        try:
            rollout = await api.rollout(quote(rollout_id, safe=""))
        except ApiError as error:
            if error.status_code != GONE:
                raise
        else:
            found.append(rollout | {"calls": full_calls(rollout["calls"])})
    return found


async def say_price(api: ApiClient, rewarder: Rewarder, groups: Sequence[Sequence[str]], times: int = 1) -> None:
    """Say on standard error about how many tokens a model will read, so many times, by the first few groups."""
    first = groups[:PRICED]
    tokens = sum([rewarder.tokens(await read_rollouts(api, group)) for group in first])
    if tokens:
        rollouts = sum(map(len, groups))
        typer.echo(price_line(rollouts, times * tokens * rollouts // sum(map(len, first))), err=True)
