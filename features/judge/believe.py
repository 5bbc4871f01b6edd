"""`rewards try` shows what a rewarder would give. `rewards check` says whether it can be believed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import StatisticsError, correlation, fmean
from typing import Any

import typer
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from ...commands.api_client import ApiClient
from ...commands.formats import number, print_json
from ...commands.show.find import collect
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.statistics import bootstrap_mean
from ...proxy.dialects.transcript import body, chat_turns
from ...store.opening import open_database
from ...trainer.waiting import all_of
from .kinds import Rank
from .rescore import opened, read_rollouts, say_price
from .rewarder import Away, Given, Rewarder, decisions
from .table import ENOUGH, HUMAN, Checked, KeptAnswers, keep_check

Json = dict[str, Any]
Group = Sequence[tuple[Json, float]]  # siblings, with their labels
HIGH_OR_LOW = {
    "right high": "judge high, people high", "right low": "judge low, people low",
    "wrong high": "judge high, people low", "wrong low": "judge low, people high",
}  # fmt: skip
LATER = "another order"
SAYS_NOTHING = "it gives them nothing"


def try_rewarder(config: Config, which: str, rollout_ids: Sequence[str], *, as_json: bool) -> None:
    """Print what a rewarder would give to rollouts, which are one group, and why. Nothing is posted."""
    rollouts, given, used = run_until_signal(_tried(config, which, rollout_ids))
    if as_json:
        print_json([{"rollout_id": rollout["rollout_id"], **asdict(one)}
                    for rollout, one in zip(rollouts, given, strict=True)])  # fmt: skip
        return
    for rollout, one in zip(rollouts, given, strict=True):
        print(f"{rollout['rollout_id']}: {one.error or ('' if one.scores else 'nothing')}".rstrip())
        for score in one.scores:
            call = f" for call {score.call_id}" if score.call_id else ""
            print(f"  {number(score.value)}{call}  {' / '.join((score.comment or '').splitlines())}")
    print(f"nothing was posted{f'; {used:,} tokens were used' if used else ''}")


async def _tried(config: Config, which: str, rollout_ids: Sequence[str]) -> tuple[list[Json], list[Given], int]:
    async with opened(config, which) as (rewarder, answers), ApiClient.of(config) as api:
        await say_price(api, rewarder, [rollout_ids])
        rollouts = await read_rollouts(api, rollout_ids)
        if not rollouts:
            raise ConfigError("none of these rollouts is there")
        try:
            return rollouts, await rewarder.reward(rollouts), answers.tokens
        except Away as error:
            raise ConfigError(f"{rewarder.label}: {error}") from None


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of `check`. `label`: the name of the rewards that are taken for the truth."""

    label: str = HUMAN
    limit: int = 500
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class AskedAgain:
    """The same groups in another order: the share of pairs `alike`, and how much better the first half fared."""

    alike: float | None
    first_half: float | None


def check_rewarder(config: Config, which: str, options: CheckOptions, *, as_json: bool) -> None:
    """Print how a rewarder agrees with people's labels, and keep that it was checked."""
    source, found, again, silent = run_until_signal(_checked(config, which, options))
    if as_json:
        more = {"verdict": found.verdict, "again": asdict(again), "without_score": len(silent)}
        print_json({"source": source, **asdict(found), **more})
        return
    url = ApiClient.of(config).url
    print(f"{source}: {found.labels} labels named {options.label}")
    if silent:
        print(f"{len(silent)} more have no score: {silent[0]}")
    print(f"pairs ordered alike: {found.alike:.2f} ({found.low:.2f} to {found.high:.2f}) of {found.pairs}")
    print(", ".join(f"{HIGH_OR_LOW[name]}: {n}" for name, n in found.confusion.items()))
    score, label = found.length
    print(f"rank correlation with the length of the answer: {number(score)} of scores, {number(label)} of labels")
    if again.alike is not None:
        print(f"the same group in another order: {again.alike:.2f} of pairs alike; attempts shown first "
              f"score {number(again.first_half)} higher")  # fmt: skip
    print("it is furthest from the label for")
    for one in found.wrong:
        print(f"  {url}/#/rollouts/{one.rollout_id}  label {number(one.label)}, score {number(one.score)}")
    print(found.verdict)


async def _checked(config: Config, which: str, options: CheckOptions) -> tuple[str, Agreement, AskedAgain, list[str]]:
    """The rewarder's source, its agreement, what another order changed, and why rollouts have no score."""
    async with opened(config, which) as (rewarder, answers), ApiClient.of(config) as api:
        source, in_groups = await rewarder.source(), rewarder.in_groups
        groups = await _labelled(api, options, source)
        if in_groups:
            groups = [group for group in groups if len(group) > 1]
        _require_pairs(groups, options, within_tasks=in_groups)
        ids = [[rollout["rollout_id"] for rollout, _ in group] for group in groups]
        try:
            unknown = [[one] for group in ids for one in group] if not in_groups else ids
            await say_price(api, rewarder, unknown, 2 if in_groups else 1)
            asked = await all_of(_scored(rewarder, source, group) for group in groups)
            labelled = [one for scored, _ in asked for one in scored]
            silent = [why for _, reasons in asked for why in reasons]
            found = agreement(labelled, within_tasks=in_groups, threshold=options.threshold)
            again = await _asked_again(config, which, rewarder, groups, answers)
        except Away as error:
            raise ConfigError(f"{rewarder.label}: {error}") from None
    if found is None:
        raise ConfigError(f"{source}: too few labelled rollouts have a score: {len(silent)} of "
                          f"{len(silent) + len(labelled)} have none: {next(iter(silent), SAYS_NOTHING)}")  # fmt: skip
    if options.label == HUMAN:
        await _keep(config, Checked(source, time.time(), found.labels, found.alike, found.low, found.high))
    return source, found, again, silent


def _require_pairs(groups: Sequence[Group], options: CheckOptions, *, within_tasks: bool) -> None:
    """Raise ConfigError unless two labels differ: of one task, where a rewarder compares siblings."""
    labels = [{label for _, label in group} for group in groups]
    if max(map(len, labels if within_tasks else [set[float]().union(*labels)]), default=0) > 1:
        return
    of = " of one task" if within_tasks else ""
    raise ConfigError(f"no two rollouts{of} have different rewards named {options.label}: label some first, as in "
                      f"`lightning-proxy reward ID 1 --name {options.label}`")  # fmt: skip


async def _keep(config: Config, checked: Checked) -> None:
    if not config.store.may_be_there:
        typer.echo("lightning-proxy: the store is not here, so `status` will not know of this check", err=True)
        return
    database = await open_database(config.store)
    try:
        await keep_check(database, checked)
    finally:
        await database.close()


async def _labelled(api: ApiClient, options: CheckOptions, source: str) -> list[list[tuple[Json, float]]]:
    """The newest completed rollouts with a label, by task; those without a task are alone.

    What the rewarder of this source gave, or an earlier version of it, is no label.
    """
    own = source.partition("@")[0]
    groups: dict[str, list[tuple[Json, float]]] = defaultdict(list)
    for listed in (await collect(api, {"status": "completed"}, options.limit))[0]:
        for rollout in await read_rollouts(api, [listed["rollout_id"]]):
            others = [one for one in rollout["rewards"] if (one["source"] or "").partition("@")[0] != own]
            if (label := _label(others, options.label)) is not None:
                groups[rollout["task_id"] or rollout["rollout_id"]].append((rollout, label))
    return list(groups.values())


def _label(rewards: Sequence[Json], name: str) -> float | None:
    """The mean over sources of the newest reward of the rollout, or else the sum of its calls'."""
    newest = {(one["source"], one["call_id"]): one["reward"] for one in rewards if one["name"] == name}
    own = [value for (_, call_id), value in newest.items() if call_id is None]
    return fmean(own) if own else sum(newest.values()) if newest else None


def _recorded(rewards: Sequence[Json], source: str) -> float | None:
    """The sum of what a source gave, the newest of each name and call."""
    newest = {(one["name"], one["call_id"]): one["reward"] for one in rewards if one["source"] == source}
    return sum(newest.values()) if newest else None


async def _scored(rewarder: Rewarder, source: str, group: Group) -> tuple[list[Labelled], list[str]]:
    """The group with its scores, recorded ones if all of it has them; or else the rewarder is asked. Its errors."""
    scores = [_recorded(rollout["rewards"], source) for rollout, _ in group]
    given: list[Given] = []
    if None in scores:
        given = await _patiently(rewarder, [rollout for rollout, _ in group])
        scores = [_sum(one) if one.scores else None for one in given]
    return [Labelled(rollout["rollout_id"], rollout["task_id"], label, score, _length(rollout))
            for (rollout, label), score in zip(group, scores, strict=True) if score is not None
            ], [one.error or SAYS_NOTHING for one in given if not one.scores]  # fmt: skip


@retry(retry=retry_if_exception_type(Away), stop=stop_after_attempt(4), wait=wait_exponential(2), reraise=True)
async def _patiently(rewarder: Rewarder, rollouts: Sequence[Json]) -> list[Given]:
    """What a rewarder gives. It is asked again where it is away for seconds; what it answered is not paid for again."""
    return await rewarder.reward(rollouts)


def _length(rollout: Json) -> int:
    """Of the last answer."""
    turns = chat_turns(decisions(rollout)[-1:])
    return sum(len(body(message)) for turn in turns for message in turn.answer)


async def _asked_again(
    config: Config,
    which: str,
    rewarder: Rewarder,
    groups: Sequence[Group],
    answers: KeptAnswers,
) -> AskedAgain:
    """Whether the order in which siblings are shown matters: for a rewarder of groups."""
    alike, halves = [], []
    if isinstance(rewarder, Rank):
        async with opened(config, which, LATER, answers) as (other, _):
            rollouts_of = [[rollout for rollout, _ in group] for group in groups]
            known = await all_of(_patiently(rewarder, rollouts) for rollouts in rollouts_of)
            found = await all_of(_patiently(other, rollouts) for rollouts in rollouts_of)
            for rollouts, given, again in zip(rollouts_of, known, found, strict=True):
                if any(one.error for one in (*given, *again)):
                    continue
                first, second = [*map(_sum, given)], [*map(_sum, again)]
                if (share := same_order(first, second)) is not None:
                    alike.append(share)
                    order = rewarder.order(rollouts)
                    half = len(order) // 2
                    halves.append(fmean(first[i] for i in order[:half]) - fmean(first[i] for i in order[half:]))
    return AskedAgain(fmean(alike) if alike else None, fmean(halves) if halves else None)


def _sum(given: Given) -> float:
    return sum(score.value for score in given.scores)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A rollout with somebody's label, a rewarder's score, and the length of its last answer in characters."""

    rollout_id: str
    task_id: str | None
    label: float
    score: float
    length: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a rewarder agrees with `labels` labels.

    `alike`: the share of `pairs` that both order alike, with its 95 % interval; a tie of the score counts a half.
    `confusion`: numbers of (label is high, score is high), each above the middle of its range, or `threshold`.
    `length`: how scores, and labels, go with the length of the answer (rank correlation).
    """

    labels: int
    pairs: int
    alike: float
    low: float
    high: float
    confusion: dict[str, int]
    length: tuple[float | None, float | None]
    wrong: tuple[Labelled, ...]

    @property
    def verdict(self) -> str:
        """Return what follows from it."""
        if self.low <= 0.5:
            return "it should not be trained on: its order may be chance"
        if self.labels < ENOUGH:
            return f"it agrees more than chance does, by {self.labels} labels; {ENOUGH} are enough to begin"
        return "it agrees more than chance does"


def agreement(found: Sequence[Labelled], *, within_tasks: bool, threshold: float | None = None) -> Agreement | None:
    """Return how scores agree with labels; None if no two labels differ.

    `within_tasks`: only rollouts of one task are compared. Otherwise that is so where there are such pairs.
    """
    of_tasks = [*_pairs(found, by_task=True)]
    pairs = of_tasks if of_tasks or within_tasks else [*_pairs(found, by_task=False)]
    if not pairs:
        return None
    by_unit: dict[str, list[float]] = defaultdict(list)
    many = len({one.task_id for one, _ in of_tasks}) > 4
    for one, other in pairs:
        for unit in (one.task_id,) if many else (one.rollout_id, other.rollout_id):
            by_unit[str(unit)].append(_alike(one, other))
    means, sizes = [*map(fmean, by_unit.values())], [*map(len, by_unit.values())]
    interval = bootstrap_mean(means, seed=0, weights=sizes)
    high_label = _middle([one.label for one in found])
    high_score = _middle([one.score for one in found]) if threshold is None else threshold
    confusion = dict.fromkeys(("right high", "right low", "wrong high", "wrong low"), 0)
    for one in found:
        is_high = one.score > high_score
        right = "right" if is_high == (one.label > high_label) else "wrong"
        confusion[f"{right} {'high' if is_high else 'low'}"] += 1
    return Agreement(
        len(found), len(pairs), fmean(_alike(*pair) for pair in pairs), interval.low, interval.high, confusion,
        (spearman([(o.score, o.length) for o in found]), spearman([(o.label, o.length) for o in found])),
        tuple(sorted(found, key=lambda one: -abs(_place(one, found, "score") - _place(one, found, "label")))[:5]),
    )  # fmt: skip


def same_order(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the share of pairs that two scorings of the same group order alike; None without a pair."""
    pairs = [*combinations(zip(first, second, strict=True), 2)]
    return fmean(_sign(a - c) == _sign(b - d) for (a, b), (c, d) in pairs) if pairs else None


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the rank correlation; None where one side does not vary."""
    try:
        return correlation(_ranks([one for one, _ in pairs]), _ranks([other for _, other in pairs]))
    except StatisticsError:
        return None


def _pairs(found: Sequence[Labelled], *, by_task: bool) -> Iterator[tuple[Labelled, Labelled]]:
    groups: dict[str | None, list[Labelled]] = defaultdict(list)
    for one in found:
        groups[one.task_id if by_task else ""].append(one)
    for task, group in groups.items():
        if task is not None:
            yield from ((one, other) for one, other in combinations(group, 2) if one.label != other.label)


def _alike(one: Labelled, other: Labelled) -> float:
    by_score, by_label = _sign(one.score - other.score), _sign(one.label - other.label)
    return 0.5 if by_score == 0 else float(by_score == by_label)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + ordered.count(value) / 2 for value in values]


def _middle(values: Sequence[float]) -> float:
    return (min(values) + max(values)) / 2


def _place(one: Labelled, found: Sequence[Labelled], name: str) -> float:
    """The share of the others that are below it."""
    value = getattr(one, name)
    below = (_sign(value - getattr(other, name)) / 2 + 0.5 for other in found)
    return fmean(below)
