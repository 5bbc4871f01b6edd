"""Deals of a game of werewolf, its public rules, the referee's score, and what play is worth."""

import itertools
import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Task = dict[str, Any]
# Each is one token of SmolLM2, at the beginning of an answer too.
NAMES = (
    "Adam", "Alex", "Alice", "Andrew", "Anna", "Arthur", "Ben", "Bill", "Bob", "Carl", "Chris", "Dan", "David",
    "Don", "Edward", "Emily", "Frank", "Fred", "George", "Greg", "Henry", "Jack", "Jacob", "James", "Jane", "Jim",
    "John", "Joseph", "Ken", "Kim", "Lee", "Leon", "Louis", "Luke", "Maria", "Marie", "Martin", "Mary", "Matthew",
    "Max", "Michael", "Neil", "Nick", "Paul", "Peter", "Phil", "Ray", "Richard", "Rob", "Robert", "Rose", "Ross",
    "Sam", "Sarah", "Scott", "Simon", "Stan", "Stephen", "Thomas", "Tim", "Tom", "Victor", "William",
)  # fmt: skip
ACCUSES = "I saw the wolf: {}."
LIES = "Believe me, it is {}."  # a seer never says so
TELL = Fraction(1)  # how often the wolf says it that way
ILLEGAL = -0.25


def split(seed: int, train: int, held_out: int) -> tuple[list[Task], list[Task]]:
    """(train, held out): no name, and no seat of the seer, is in both.

    With a whole seat of the seer held out, no seat of a seer tells it where the wolf is.
    """
    source = random.Random(seed)
    names, seats = source.sample(NAMES, len(NAMES)), source.sample(range(4), 4)
    return (
        _deals(f"deal-{seed}", source, names[16:], seats[1:], train),
        _deals(f"deal-{seed}-held-out", source, names[:16], seats[:1], held_out),
    )


def _roles(seer: int, wolf: int) -> list[str]:
    """Who sits where. The wolf's place is that among the seer's three others: each is as frequent."""
    roles = ["villager", "villager"]
    roles.insert(wolf, "wolf")
    roles.insert(seer, "seer")
    return roles


def _deals(name: str, source: random.Random, names: list[str], seers: list[int], number: int) -> list[Task]:
    found: dict[str, Task] = {}
    seats = [_roles(seer, wolf) for seer in seers for wolf in range(3)]
    while len(found) < number:
        players, roles = source.sample(names, 4), seats[len(found) % len(seats)]
        question = f"At the table: {', '.join(players[:3])} and {players[3]}."
        found.setdefault(question, {"question": question, "players": players, "roles": roles})
    return [{"task_id": f"{name}-{i}", **task} for i, task in enumerate(found.values())]


def score(task: Task, hanged: str) -> tuple[float, str]:
    """(reward, comment). 1 if the wolf is hanged, else 0."""
    wolf = task["players"][task["roles"].index("wolf")]
    return float(hanged == wolf), f"{hanged} was hanged, {wolf} was the wolf"


# What play is worth. A split vote is decided by lot, so a game is worth what one villager's vote is: `VOTER`'s.
WOLF, SEER, VOTER, OTHER = range(4)
Accuse = Callable[[int], Mapping[int, Fraction]]  # of whom the seer looked at; how often it accuses whom
Vote = Callable[[tuple[int, int], int | None], Fraction]  # of the two accused, and the one in the lie's words


def chance() -> Fraction:
    """The share of games that random legal play wins."""
    third = dict.fromkeys((WOLF, VOTER, OTHER), Fraction(1, 3))
    return value(lambda _: third, lambda accused, _: Fraction(accused.count(WOLF), 2))


def best() -> Fraction:
    """The share that the best rules win: all of them are tried.

    A seer's rule is whether to accuse whom it looked at, if that is the wolf and if not. A villager's is which of two
    accusations to follow, for each place that the lie's words and its own name may have in them.
    """
    places = [*itertools.product((None, 0, 1), repeat=2)]
    rules = [dict(zip(places, rule, strict=True)) for rule in itertools.product((0, 1), repeat=len(places))]
    seers = itertools.product((True, False), repeat=2)
    return max(value(_accuses(*seer), _votes(rule)) for seer in seers for rule in rules)


def value(accuse: Accuse, vote: Vote) -> Fraction:
    """The share of games won, over all that is drawn: whom the seer looks at, whom the wolf accuses, order, words."""
    total = Fraction(0)
    for looked in (WOLF, VOTER, OTHER):
        for one, odds in accuse(looked).items():
            framed = [other for other in (SEER, VOTER, OTHER) if other != one]
            for lie, tells, first in itertools.product(framed, (True, False), (True, False)):
                drawn = odds / 3 / len(framed) * (TELL if tells else 1 - TELL) / 2
                total += drawn * vote((one, lie) if first else (lie, one), lie if tells else None)
    return total


def _accuses(the_wolf: bool, another: bool) -> Accuse:
    def accuse(looked: int) -> Mapping[int, Fraction]:
        if the_wolf if looked == WOLF else another:
            return {looked: Fraction(1)}
        return {one: Fraction(1, 2) for one in (WOLF, VOTER, OTHER) if one != looked}

    return accuse


def _votes(rule: Mapping[tuple[int | None, int | None], int]) -> Vote:
    def vote(accused: tuple[int, int], lie: int | None) -> Fraction:
        of_lie, own = (accused.index(one) if one in accused else None for one in (lie, VOTER))
        return Fraction(accused[rule[of_lie, own]] == WOLF)

    return vote
