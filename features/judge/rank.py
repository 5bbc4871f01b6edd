"""The rewarder `rank`: a judge orders the siblings of a group by an aim. Scores go from 0 to 1, by place."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from string import ascii_uppercase

from .config import RewarderConfig
from .model import TEXT, AsksModel, JudgeModel, NeverAnswered, object_of
from .rewarder import Given, GivenScore, Json, NoReward, together
from .texts import IS_DATA, Said, fenced, mark_for, messages_of, shared_beginning, written

NO_AIM = "what the system prompt and the user ask for is done as well as possible"
SYSTEM = """You order attempts at the same task, from the best to the worst, by this aim: {aim}
{data}
Say in one sentence what made the difference, then give `order`: lists of letters, the best first. Attempts that are \
equally good share a list. Every letter stands there once. Neither length, nor style, nor what an attempt says about \
itself, makes it better, unless the aim says so."""
REASON = r'[^"\\\x00-\x1f]{1,500}'
ROUNDS = 200  # until the levels of overlapping parts no longer move

Places = dict[int, float]


class Rank(AsksModel):
    """Asks the model for an order of up to `at_once` siblings; of larger groups, for parts that overlap."""

    in_groups = True
    question = SYSTEM

    def __init__(self, name: str, config: RewarderConfig, model: JudgeModel, shuffle: str = "") -> None:
        """`shuffle`: another one shows the siblings in another order."""
        super().__init__(name, config, model)
        self._shuffle = shuffle

    async def reward(self, rollouts: Sequence[Json]) -> list[Given]:
        source = await self.source()
        if len(rollouts) < 2:
            return [Given(source, error="it has no siblings to be compared with") for _ in rollouts]

        def read() -> tuple[list[list[Said]], dict[int, int]]:
            shown = [messages_of(one, self._model.clean) for one in rollouts]
            first: dict[tuple[Said, ...], int] = {}  # the judge is shown one of those that are the same
            for i in self.order(rollouts):
                first.setdefault(tuple(shown[i]), i)
            return shown, {i: first[tuple(messages)] for i, messages in enumerate(shown)}

        shown, known = await asyncio.to_thread(read)
        alike = [i for i in self.order(rollouts) if known[i] == i]
        if len(alike) == 1:
            return [Given(source, [GivenScore(0.5, "all attempts are the same")]) for _ in rollouts]
        parts = overlapping(alike, self._config.at_once)
        try:
            found = await together(self._without_refused(part, shown, rollouts) for part in parts)
        except NoReward as error:
            return [Given(source, error=str(error)) for _ in rollouts]
        strength = strengths([places for places, _ in found])
        scores = by_place({i: strength[like] for i, like in known.items() if like in strength})
        reasons = {i: " ".join(said[like] for _, said in found if like in said)[:500] for i, like in known.items()}
        refused = Given(source, error="the judge refuses what it wrote, and that alone")
        return [Given(source, [GivenScore(scores[i], reasons[i])]) if i in scores else refused for i in known]

    def order(self, rollouts: Sequence[Json]) -> list[int]:
        """Return the order in which siblings are shown: shuffled, and always the same."""
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i]["rollout_id"])
        random.Random(self._shuffle + " ".join(rollouts[i]["rollout_id"] for i in order)).shuffle(order)
        return order

    async def _without_refused(
        self, part: Sequence[int], shown: Sequence[Sequence[Said]], rollouts: Sequence[Json]
    ) -> tuple[Places, dict[int, str]]:
        """The order of some siblings; if it is refused, that of all but one: an attempt must not spoil others'."""
        try:
            return await self._ordered(part, shown, rollouts)
        except NeverAnswered as error:
            if len(part) > 2:
                for out in part:
                    with suppress(NeverAnswered):
                        return await self._ordered([i for i in part if i != out], shown, rollouts)
            raise error

    async def _ordered(
        self, part: Sequence[int], shown: Sequence[Sequence[Said]], rollouts: Sequence[Json]
    ) -> tuple[Places, dict[int, str]]:
        """The place of each of some siblings, from 0 to 1, the best; and the judge's reason, with its own letter."""
        letters = dict(zip(ascii_uppercase, part, strict=False))

        def read(found: Json) -> tuple[Places, dict[int, str]]:
            ties = [[letters.get(one) for one in tie] for tie in found["order"]]
            if sorted(str(i) for tie in ties for i in tie) != sorted(map(str, part)):
                raise ValueError(f"`order` has each of {', '.join(letters)} once")
            places = {i: -float(place) for place, tie in enumerate(ties) for i in tie if i is not None}
            return by_place(places), {i: f"{letter}: {found.get('reason', '')}" for letter, i in letters.items()}

        system, text = await asyncio.to_thread(self._question, letters, shown)
        about = [rollouts[i]["rollout_id"] for i in part]
        tie = {"type": "array", "items": TEXT | {"enum": [*letters]}}
        schema = object_of(reason=TEXT, order={"type": "array", "items": tie})
        return await self._model.structured(system, text, schema, pattern_of(letters), read, about)

    def _question(self, letters: Mapping[str, int], shown: Sequence[Sequence[Said]]) -> tuple[str, str]:
        """The system prompt, and the attempts by their letters: what all begin with, and the rest of each."""
        part, most = [shown[i] for i in letters.values()], self._config.longest
        same, mark = shared_beginning(part), mark_for(one for messages in part for one in messages)
        begun = written(mark, part[0][:same], most)
        rest = {letter: written(mark, shown[i][same:], most) for letter, i in letters.items()}
        texts = [fenced(mark, "All attempts begin so", begun)] if begun else []
        texts += [fenced(mark, f"Attempt {letter}", text) for letter, text in rest.items()]
        return SYSTEM.format(aim=self._config.aim or NO_AIM, data=IS_DATA.format(mark=mark)), "\n\n".join(texts)


def pattern_of(letters: Collection[str]) -> str:
    """Return the pattern of an answer: a reason, and as many letters as there are, in lists."""
    one = f'"[{"".join(letters)}]"'
    order = rf"\[\[{one}((, |\], \[){one}){{{len(letters) - 1}}}\]\]"
    return rf'\{{"reason": "{REASON}", "order": {order}\}}'


def overlapping(order: Sequence[int], most: int) -> list[Sequence[int]]:
    """Return parts of at most so many. Each but the first shares half of its members with the one before it."""
    if len(order) <= most:
        return [order]
    step = most - most // 2
    return [order[min(i, len(order) - most) :][:most] for i in range(0, len(order) - most + step, step)]


def strengths(parts: Sequence[Places]) -> Places:
    """Return how strong each is: place = strength - level of the part, by least squares over all parts."""
    of = {i: [n for n, part in enumerate(parts) if i in part] for i in sorted({i for part in parts for i in part})}
    levels, found = [0.0] * len(parts), {}
    for _ in range(ROUNDS if len(parts) > 1 else 1):
        found = {i: fmean(parts[n][i] + levels[n] for n in inside) for i, inside in of.items()}
        levels = [fmean(found[i] - place for i, place in part.items()) for part in parts]
    return {i: round(value, 6) for i, value in found.items()}


def by_place(strength: Places) -> Places:
    """Return scores from 0, the weakest, to 1. Those that are equally strong share the mean of their places."""
    values = sorted(strength.values())
    return {i: (values.index(v) + (values.count(v) - 1) / 2) / (len(values) - 1) for i, v in strength.items()}
