"""How often the gate before a new version is wrong, and how many pairs it takes: `make bench-promotion`, minutes.

Simulates comparisons of a candidate with the live version, by the product's own proxy/evidence.py, which is
looked at after every pair. A pair is one rollout a side, or four siblings of one task a side. Beside it stand two ways
that are not exact: a z test, and the asymptotic confidence sequence of Waudby-Smith et al. (2024, doi
10.1214/24-AOS2408). All of them call a candidate worse at a level of 5 %. Prints Markdown.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, quantiles

import numpy as np
from numpy.typing import NDArray
from results_page import Page, option
from rich.progress import track

from lightning_proxy.proxy.evidence import Evidence

MARGIN, SIGN_MARGIN, LEVEL = 0.1, 0.2, 0.05
DIFFERENCES = (-0.2, -0.1, -0.05, 0.0, 0.1)
LOOKS = 2000
BURN_IN = 30
BOUNDS = (250, 500, 1000)  # of the candidate's rollouts
SIBLINGS = 4
TASKS = 50
AT_A_TIME = 64  # pairs that run

Floats = NDArray[np.float64]
Pairs = Callable[[np.random.Generator, int, float], Floats]  # so many pairs, of a candidate that is better by so much


def solved(chance: float) -> Pairs:
    """Rewards of 0 and 1."""

    def draw(rng: np.random.Generator, pairs: int, better: float) -> Floats:
        return (rng.random(pairs) < chance + better) * 1.0 - (rng.random(pairs) < chance)

    return draw


def skewed(rng: np.random.Generator, pairs: int, better: float) -> Floats:
    """Rewards from a beta distribution with most of it near 0."""
    return rng.beta(0.3 + better, 0.7 - better, pairs) - rng.beta(0.3, 0.7, pairs)


def lopsided(rng: np.random.Generator, pairs: int, better: float) -> Floats:
    """Nearly always a little better than on average, seldom much worse."""
    return np.where(rng.random(pairs) < 0.05, -0.76, 0.04) + better


def lucky(rng: np.random.Generator, pairs: int, better: float) -> Floats:
    """Nearly always a little worse than on average, seldom much better."""
    return better - lopsided(rng, pairs, 0.0)


def siblings(effect: float) -> Pairs:
    """Means of siblings, of tasks that the candidate is better or worse at by `effect` than on average."""
    return lambda rng, pairs, better: _siblings(rng, pairs, better, effect).mean(axis=1)


def singly(effect: float) -> Pairs:
    """The same siblings, each of which counts as a pair."""
    return lambda rng, pairs, better: _siblings(rng, pairs // SIBLINGS, better, effect).ravel()


def _siblings(rng: np.random.Generator, tasks: int, better: float, effect: float) -> Floats:
    """The differences of siblings one by one: (tasks, siblings)."""
    live, effects = rng.uniform(0.45, 0.55, (tasks, 1)), rng.choice((-effect, effect), (tasks, 1))
    shape = (tasks, SIBLINGS)
    return (rng.random(shape) < live + effects + better) * 1.0 - (rng.random(shape) < live)


def passes(rng: np.random.Generator, pairs: int, better: float) -> Floats:
    """The same tasks again and again, shuffled in each pass; the candidate is better at half of them."""
    effects = np.repeat((-0.2, 0.2), TASKS // 2)
    shuffled = np.concatenate([rng.permutation(effects) for _ in range(-(-pairs // TASKS))])[:pairs]
    return (rng.random(pairs) < 0.5 + shuffled + better) * 1.0 - (rng.random(pairs) < 0.5)


def signs(rng: np.random.Generator, pairs: int, better: float) -> Floats:
    """Which of two answers is shorter: never equal."""
    return np.where(rng.random(pairs) < (1 + better) / 2, 1.0, -1.0)


def sign_means(rng: np.random.Generator, pairs: int, better: float) -> Floats:
    """How much more often a sibling's answer is the shorter one, over all pairings of a group."""
    shift = math.sqrt(2) * NormalDist().inv_cdf((1 + better) / 2)
    ours, theirs = rng.normal(shift, 1, (pairs, SIBLINGS, 1)), rng.normal(0, 1, (pairs, 1, SIBLINGS))
    return np.sign(ours - theirs).mean(axis=(1, 2))


SHAPES: dict[str, Pairs] = {
    "half are solved": solved(0.5),
    "a fifth is solved": solved(0.2),
    "a twentieth is solved": solved(0.05),
    "skewed rewards": skewed,
    "often a little better, seldom much worse": lopsided,
    "often a little worse, seldom much better": lucky,
    "the same 50 tasks in shuffled passes": passes,
    "siblings of tasks, 4 a side": siblings(0.35),
    "the same siblings, counted singly (wrong)": singly(0.35),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How rewards, tool errors and lengths come in pairs, and how many rollouts a side each pair takes."""

    name: str
    reward: Pairs
    errors: Pairs
    lengths: Pairs
    rollouts: int


KINDS = (
    Kind("half are solved", solved(0.5), solved(0.05), signs, 1),
    Kind("a fifth is solved", solved(0.2), solved(0.05), signs, 1),
    Kind("skewed rewards", skewed, solved(0.05), signs, 1),
    Kind(
        "siblings of tasks, 4 a side",
        siblings(0.2),
        lambda rng, pairs, better: solved(0.05)(rng, pairs * SIBLINGS, better).reshape(pairs, -1).mean(axis=1),
        sign_means,
        SIBLINGS,
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one candidate: the verdict, after how many pairs, and how its metrics stand at the bound."""

    verdict: str
    pairs: int
    means: tuple[float, ...]  # of each metric, divided by its margin


def outcome(draws: Sequence[tuple[Pairs, float, float]], pairs: int, rng: np.random.Generator) -> Outcome:
    """Compare by several metrics, each with the true difference and its margin, up to so many pairs.

    The candidate is worse once one metric says so, and safe once all do.
    """
    found = []
    for draw, better, margin in draws:
        evidence = Evidence(margin, LEVEL, len(draws))
        evidence.extend(draw(rng, pairs, better))
        found.append(evidence)
    never = pairs + 1
    worse = min(evidence.worse_at or never for evidence in found)
    safe = max(evidence.safe_at or never for evidence in found)
    verdict = "undecided" if min(worse, safe) == never else "worse" if worse <= safe else "safe"
    means = tuple((evidence.mean or 0.0) / evidence.margin for evidence in found)
    return Outcome(verdict, min(worse, safe, pairs), means)


def metrics(kind: Kind, better: float, several: bool) -> list[tuple[Pairs, float, float]]:
    """The reward alone, or with tool errors and lengths that are equal."""
    reward = (kind.reward, better, MARGIN)
    return [reward, (kind.errors, 0.0, MARGIN), (kind.lengths, 0.0, SIGN_MARGIN)] if several else [reward]


def z_alarm(differences: Floats) -> bool:
    """Whether a z test looked at after every pair ever calls the candidate worse, from 30 pairs on."""
    pairs, means, spreads = running(differences)
    return bool(np.any((means < -1.645 * spreads / np.sqrt(pairs))[BURN_IN - 1 :]))


def asymptotic_alarm(differences: Floats, burn_in: int) -> bool:
    """Whether the asymptotic confidence sequence ever lies below 0: theorem 2.2, with 5 % on each side.

    Its rho makes it narrowest at 100 pairs.
    """
    pairs, means, spreads = running(differences)
    alpha = 2 * LEVEL
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / 100
    scaled = pairs * rho2 + 1
    width = spreads * np.sqrt(2 * scaled / (pairs**2 * rho2) * np.log(np.sqrt(scaled) / alpha))
    return bool(np.any((means + width < 0)[burn_in - 1 :]))


def running(differences: Floats) -> tuple[Floats, Floats, Floats]:
    """The number of pairs, their mean and their standard deviation after each pair."""
    pairs = np.arange(1, len(differences) + 1)
    means = np.cumsum(differences) / pairs
    return pairs, means, np.sqrt(np.maximum(np.cumsum(differences**2) / pairs - means**2, 0))


def false_alarms(comparisons: int) -> Iterator[Sequence[str]]:
    """A row for each shape: how often what is said of a candidate is wrong."""
    for name, draw in track(SHAPES.items(), "false alarms", transient=True):
        rng, alarms = np.random.default_rng(0), np.zeros(5)
        can_drop = name != "a twentieth is solved"  # a share of 0.05 cannot be 0.1 lower
        for _ in range(comparisons):
            differences = draw(rng, LOOKS, 0.0)
            equal, dropped = Evidence(MARGIN, LEVEL), Evidence(MARGIN, LEVEL)
            equal.extend(differences)
            dropped.extend(draw(rng, LOOKS, -MARGIN) if can_drop else ())
            alarms += (
                equal.worse_at is not None,
                dropped.safe_at is not None,
                z_alarm(differences),
                asymptotic_alarm(differences, 2),
                asymptotic_alarm(differences, BURN_IN),
            )
        shares = [f"{100 * share:.1f} %" for share in alarms / comparisons]
        yield [name, shares[0], shares[1] if can_drop else "-", *shares[2:]]


def decisions(comparisons: int, bound: int) -> Iterator[Sequence[str]]:
    """A row for each kind of reward and true difference: what is decided, and after how many pairs."""
    for kind in track(KINDS, "decisions", transient=True):
        for better in DIFFERENCES:
            row = [f"{kind.name}", f"{better:+.2f}" if better else "0"]
            for several in (False, True):
                rng = np.random.default_rng(0)
                draws = metrics(kind, better, several)
                found = [outcome(draws, bound // kind.rollouts, rng) for _ in range(comparisons)]
                row += summary(found)
            yield row


def at_the_bound(comparisons: int) -> Iterator[Sequence[str]]:
    """A row for each bound and true difference: how often the candidate goes live, by the rule at the bound."""
    kinds = [(KINDS[0], bound, False) for bound in BOUNDS] + [(KINDS[-1], bound, False) for bound in BOUNDS]
    for kind, bound, several in track([*kinds, (KINDS[-1], BOUNDS[1], True)], "bounds", transient=True):
        name = f"{kind.name}, 3 metrics" if several else kind.name
        for better in DIFFERENCES:
            rng, draws = np.random.default_rng(0), metrics(kind, better, several)
            found = [outcome(draws, bound // kind.rollouts, rng) for _ in range(comparisons)]
            shares = [f"{100 * goes_live(found, least):.1f} %" for least in (math.inf, 0.0, -0.5, -math.inf)]
            yield [name, str(bound), f"{better:+.2f}" if better else "0", percent(found, "undecided"), *shares]


def goes_live(found: Sequence[Outcome], least: float) -> float:
    """The share that is safe, or undecided with each metric at so many margins above 0 or more."""
    live = [each.verdict == "safe" or (each.verdict == "undecided" and least <= min(each.means)) for each in found]
    return sum(live) / len(found)


def lengths(comparisons: int) -> Iterator[Sequence[str]]:
    """A row for each true difference of signs: when longer answers are found, as one of three metrics."""
    for better in (-0.8, -0.6, -0.4, -0.2, 0.0):
        row = [f"{(1 - better) / 2:.0%}"]
        for draw, pairs in ((signs, 1000), (sign_means, 250)):
            rng, found = np.random.default_rng(0), []
            for _ in range(comparisons):
                evidence = Evidence(SIGN_MARGIN, LEVEL, metrics=3)
                evidence.extend(draw(rng, pairs, better))
                found.append(Outcome(evidence.verdict, min(evidence.worse_at or pairs, evidence.safe_at or pairs), ()))
            row += summary(found)
        yield row


def orders(comparisons: int) -> Iterator[Sequence[str]]:
    """A row for each order in which pairs count and for who is slow: how often what is said of a candidate is wrong."""
    for order in ("ended", "began"):
        for slow in ("candidate", "live version", "both"):
            rng, wrong = np.random.default_rng(0), np.zeros(2)
            for _ in range(comparisons):
                equal, dropped = Evidence(MARGIN, LEVEL), Evidence(MARGIN, LEVEL)
                equal.extend(in_flight(rng, 1000, 0.0, slow, order))
                dropped.extend(in_flight(rng, 1000, -MARGIN, slow, order))
                wrong += (equal.verdict == "worse", dropped.verdict == "safe")
            yield [
                f"as they {order}" + " (wrong)" * (order == "ended"),
                slow,
                *(f"{100 * share:.1f} %" for share in wrong / comparisons),
            ]


def in_flight(rng: np.random.Generator, pairs: int, better: float, slow: str, order: str) -> Floats:
    """The differences of single rollouts in the order in which pairs began or ended; slow failures take ten times."""
    ours, theirs = rng.random(pairs) < 0.5 + better, rng.random(pairs) < 0.5
    differences = ours * 1.0 - theirs
    waits = (~ours & (slow != "live version")) | (~theirs & (slow != "candidate"))
    takes = np.where(waits, 10.0, 1.0) * rng.uniform(0.8, 1.2, pairs)
    free, ends = [0.0] * AT_A_TIME, np.zeros(pairs)
    for i, time in enumerate(takes.tolist()):
        ends[i] = heapq.heappop(free) + time
        heapq.heappush(free, float(ends[i]))
    return differences[np.argsort(ends)] if order == "ended" else differences


def percent(found: Sequence[Outcome], verdict: str) -> str:
    return f"{100 * sum(each.verdict == verdict for each in found) / len(found):.1f} %"


def summary(found: Sequence[Outcome]) -> list[str]:
    """How many are worse and how many safe, and after how many pairs: the median, and the ninth of ten."""
    tenths = quantiles([each.pairs for each in found], n=10, method="inclusive")
    return [percent(found, "worse"), percent(found, "safe"), f"{tenths[4]:.0f} ({tenths[8]:.0f})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=2000, help="of each row (default %(default)s)")
    option(parser, "promotion")
    options = parser.parse_args()
    n, page = options.comparisons, Page("How sure the gate before a new version is")
    table = page.table
    table(
        f"Wrong in how many of {n:,} comparisons, looked at after each of {LOOKS:,} pairs:",
        ("pairs", "equal, called worse", "drop of 0.1, called safe", "z test", "asymptotic", f"from {BURN_IN} pairs"),
        false_alarms(n),
    )
    table(
        f"Wrong in how many of {n:,} comparisons of single rollouts, by the order in which pairs count, 1,000 pairs:",
        ("pairs count", "failures are slow of", "equal, called worse", "drop of 0.1, called safe"),
        orders(n),
    )
    of = ("worse", "safe", "pairs")
    table(
        f"Decided within {BOUNDS[-1]:,} rollouts a side; pairs: the median, and nine of ten:",
        ("pairs", "true difference", *(f"{each}, 1 metric" for each in of), *(f"{each}, 3" for each in of)),
        decisions(n, BOUNDS[-1]),
    )
    table(
        "Goes live, by the bound on the candidate's rollouts and what is done there:",
        (
            "pairs",
            "bound",
            "true difference",
            "undecided",
            "taken back",
            "if mean >= 0",
            "if mean >= -margin / 2",
            "goes live",
        ),
        at_the_bound(n),
    )
    table(
        f"Longer answers, by signs with a margin of {SIGN_MARGIN}, one of three metrics, 1,000 rollouts a side:",
        ("longer in", *of, *(f"{each}, 4 a side" for each in of)),
        lengths(n),
    )
    page.save(options.page)


if __name__ == "__main__":
    main()
