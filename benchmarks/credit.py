"""What each credit strategy, choice of agents, baseline and loss learns on small problems, each at its best rate.

The policy is a table: a softmax over two actions for each state, trained by gradient descent. Rollouts are the records
that the proxy would have made of it; advantages and losses are the trainer's own. A rate is chosen for every number, by
seeds that are not among those reported: at one rate for all, a baseline that divides by nothing would only seem slow.
A state is all that the policy sees: in an agent whose prompts hold its whole history, `anchor` finds fewer calls
to compare. The judge is a script (scripted_judge.py). Losses take steps on rollouts of the policy as it was
BEHIND steps ago: on those of the present one all have the same gradient. Every decision is an answer of one token.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from statistics import fmean, stdev, variance
from typing import NamedTuple

import torch
from report import Page, option
from rich.progress import track
from scripted_judge import judged

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.trainer import TrainerConfig
from lightning_proxy.core.records import ModelCall
from lightning_proxy.core.returns import Earned
from lightning_proxy.trainer.credit.strategies import group_credit
from lightning_proxy.trainer.step.losses import LossInputs, policy_loss
from lightning_proxy.trainer.types import RolloutRewards, Sibling

SEEDS = range(8)
CHOOSING = range(100, 106)  # the seeds by which a rate is chosen
RATES = (3, 10, 30, 100, 300, 1000, 3000)
SIBLINGS = 8
STEPS = 24

STRATEGIES = {
    "uniform": {"credit": "uniform"},
    "discounted, 1.0": {"credit": "discounted", "discount": 1.0},
    "discounted, 0.9": {"credit": "discounted", "discount": 0.9},
    "discounted, 0": {"credit": "discounted", "discount": 0.0},
    "anchor, 0.9": {"credit": "anchor", "discount": 0.9},
    "anchor, 0": {"credit": "anchor", "discount": 0.0},
    "rae": {"credit": "rae"},
}
JUDGES = {
    "judge, 0.9 (scripted)": {"credit": "judge", "discount": 0.9},
    "judge, 0 (scripted)": {"credit": "judge", "discount": 0.0},
}
ONE, EACH = {"agents": ["planner"]}, {"agents": ["planner", "executor"]}
AGENTS = {
    "uniform, all as one": {},
    "uniform, planner only": ONE,
    "uniform, by agent (own)": {**EACH, "agent_credit": "own"},
    "discounted, all as one": {"credit": "discounted"},
    "discounted, planner only": {"credit": "discounted", **ONE},
    "discounted, by agent (own)": {"credit": "discounted", **EACH, "agent_credit": "own"},
    "rae, all as one": {"credit": "rae"},
}
BOTH_NAMES = {"reward_weights": {"right": 1.0, "style": 1.0}}
NAMES = {"uniform (their sum)": BOTH_NAMES, "gdpo": {"credit": "gdpo", **BOTH_NAMES}}
BASELINES = {
    name: {"credit": "discounted", "discount": 0.9, "baseline": name} for name in TrainerConfig.known("baseline")
}
BASELINES["reinforce_pp"]["compare"] = "step"
BASELINE_GROUPS = 4  # in a step, each of another task
OF_LOSSES = {"credit": "discounted", "discount": 0.9}
LOSSES = {
    **{name: {"loss_type": name, **OF_LOSSES} for name in ("cispo", "grpo", "sapo", "vespo")},
    **{name: {"loss": name, **OF_LOSSES} for name in TrainerConfig.known("loss")},
}
BEHIND = 4  # steps


@dataclass
class Policy:
    """The probability of action 1 in each state is the logistic function of the state's parameter.

    `random` decides its actions and what the world does. `task` is the number of the group in its step.
    """

    random: Random
    parameters: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    task: int = 0

    def probability(self, state: int) -> float:
        return (1 + math.tanh(self.parameters[state] / 2)) / 2

    def act(self, state: int) -> int:
        return int(self.chance(self.probability(state)))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def learn(
        self, rollouts: Sequence[Sequence[tuple[int, int, float]]], config: TrainerConfig, sampler: Policy, rate: float
    ) -> None:
        """One step down the trainer's loss on the (state, action, advantage) of rollouts, which all weigh the same."""
        calls = [(*call, 1 / len(calls) / len(rollouts)) for calls in rollouts for call in calls]
        states, actions, advantages, weights = zip(*calls, strict=True)
        known = {state: i for i, state in enumerate(dict.fromkeys(states))}
        parameters = torch.tensor([self.parameters[state] for state in known], requires_grad=True)
        sampled = torch.tensor([sampler.parameters[state] for state in known])
        places, signs = torch.tensor([[known[state]] for state in states]), _column(actions) * 2 - 1
        logprobs, before = (torch.nn.functional.logsigmoid(signs * of[places]) for of in (parameters, sampled))
        mask = torch.ones_like(before)
        given = LossInputs(logprobs, before, _column(advantages), mask, config, weights=_column(weights))
        policy_loss(given).backward()
        assert parameters.grad is not None
        for state, slope in zip(known, parameters.grad.tolist(), strict=True):
            self.parameters[state] -= rate * slope


@dataclass
class Episode:
    """A rollout in the making: (state, action) of each call, the rewards of calls by position, the rollout's own.

    `named`: the rollout's own by name, of which `final` is the sum.
    `agents`: who made each call, where they have names. `score`: how well it went, from 0 to 1, without the noise of
    rewards; of two agents each its own.
    """

    decisions: list[tuple[int, int]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    final: float | None = None
    named: dict[str, float] = field(default_factory=dict)
    score: float | tuple[float, float] = 0.0
    agents: list[str | None] = field(default_factory=list)

    def act(self, policy: Policy, state: int, agent: str | None = None) -> int:
        self.decisions.append((state, policy.act(state)))
        self.agents.append(agent)
        return self.decisions[-1][1]

    @property
    def scores(self) -> tuple[float, ...]:
        return self.score if isinstance(self.score, tuple) else (self.score,)

    def sibling(self) -> Sibling:
        calls = [_call(i, *decision, self.agents[i]) for i, decision in enumerate(self.decisions)]
        named = {name: Earned(value, {}) for name, value in self.named.items()}
        return Sibling(calls, RolloutRewards(self.final, {str(i): r for i, r in self.rewards.items()}, named=named))


@dataclass(frozen=True)
class Problem:
    """`idle`: states in which no action matters; a judge knows them."""

    title: str
    play: Callable[[Policy], Episode]
    idle: frozenset[int] = frozenset()

    def groups(self, policy: Policy, tasks: int, siblings: int = SIBLINGS) -> list[list[Episode]]:
        return [[self.play(replace(policy, task=task)) for _ in range(siblings)] for task in range(tasks)]

    def sibling(self, episode: Episode, config: TrainerConfig) -> Sibling:
        found = episode.sibling()
        return judged(found, config, self.idle) if config.credit == "judge" else found


def delayed(policy: Policy) -> Episode:
    """Six questions, each with a right answer; a reward of 1 at the end is as likely as the share that was right."""
    episode = Episode()
    episode.score = fmean(episode.act(policy, state) for state in range(6))
    episode.final = float(policy.chance(episode.score))
    return episode


def noisy(policy: Policy) -> Episode:
    """Twelve questions; each right answer is rewarded at once, with 1 and noise that no answer has a part in."""
    episode = Episode()
    answers = [episode.act(policy, state) for state in range(12)]
    episode.rewards = {i: right + (3.0 if policy.chance(0.25) else -1.0) for i, right in enumerate(answers)}
    episode.score = fmean(answers)
    return episode


def early(policy: Policy) -> Episode:
    """One coin, taken at the first call or else at the second: the sum is the same, but sooner is better."""
    episode = Episode()
    first = episode.act(policy, 0)
    episode.act(policy, 1)
    episode.rewards = {0: float(first), 1: float(not first)}
    episode.score = float(first)
    return episode


def varied(policy: Policy) -> Episode:
    """Three questions of four kinds, as chance will have it; a right answer is worth 1, the kind itself up to 9."""
    episode = Episode()
    kinds = [policy.random.randrange(4) for _ in range(3)]
    answers = [episode.act(policy, kind) for kind in kinds]
    episode.rewards = {i: answer + 3.0 * kind for i, (answer, kind) in enumerate(zip(answers, kinds, strict=True))}
    episode.score = fmean(answers)
    return episode


def two_names(policy: Policy) -> Episode:
    """Six questions with a right answer each, worth 1 in all, and six about style, worth 20; both come at the end."""
    episode = Episode()
    right, style = (fmean(episode.act(policy, first + state) for state in range(6)) for first in (0, 10))
    episode.named, episode.score = {"right": right, "style": 20 * style}, (right, style)
    episode.final = sum(episode.named.values())
    return episode


def sparse(policy: Policy) -> Episode:
    """A corridor of eight rooms: action 1 goes on, 0 back to the room before; 1 for its end within 30 calls, else 0.

    In a fifth of calls the action turns into the other.
    """
    episode, room = Episode(final=0.0), 0
    for _ in range(30):
        room = room + 1 if episode.act(policy, room) != policy.chance(0.2) else max(0, room - 1)
        if room == 8:
            episode.final = episode.score = 1.0
            break
    return episode


def work_together(policy: Policy) -> tuple[Episode, list[int], list[int]]:
    """A planner's two decisions, then an executor's six: the rollout, and what of theirs was right."""
    episode = Episode()
    plans = [episode.act(policy, state, "planner") for state in range(2)]
    steps = [episode.act(policy, 10 + state, "executor") for state in range(6)]
    episode.score = (fmean(plans), fmean(steps))
    return episode, plans, steps


def each_rewarded(policy: Policy) -> Episode:
    """Every right decision is worth 1; an executor's step is also paid for with luck that nobody has a part in."""
    episode, plans, steps = work_together(policy)
    luck = [3.0 if policy.chance(0.25) else -1.0 for _ in steps]
    episode.rewards = dict(enumerate([*map(float, plans), *(s + more for s, more in zip(steps, luck, strict=True))]))
    return episode


def last_rewarded(policy: Policy) -> Episode:
    """The executor's right steps are rewarded, each by what share of the plan was right; the plan itself is not."""
    episode, plans, steps = work_together(policy)
    episode.rewards = {2 + i: step * fmean(plans) for i, step in enumerate(steps)}
    return episode


def unequal(policy: Policy) -> Episode:
    """Four tasks, of 1, 2, 4 and 6 questions of their own: 1 if all answers to a task are right, else 0."""
    episode, length = Episode(), (1, 2, 4, 6)[policy.task]
    episode.final = episode.score = float(min(episode.act(policy, 10 * length + i) for i in range(length)))
    return episode


PROBLEMS = (
    Problem("delayed reward", delayed),
    Problem("noisy reward of each action", noisy),
    Problem("states of differing worth", varied),
    Problem("equal sums, sooner is better", early, frozenset({1})),
    Problem("sparse, long horizon", sparse),
)
BASELINE_PROBLEMS = (*PROBLEMS, Problem("tasks of differing difficulty", unequal))
LOSS_PROBLEMS = (PROBLEMS[0], PROBLEMS[2], PROBLEMS[4])
TWO_AGENTS = (
    Problem("each is rewarded: planner, executor", each_rewarded),
    Problem("the executor is rewarded for both: planner, executor", last_rewarded),
)


class Way(NamedTuple):
    """How many groups a step has, and how many steps old the policy is that they were sampled from."""

    groups: int = 1
    behind: int = 0


def trained(problem: Problem, config: TrainerConfig, way: Way, rate: float, seed: int) -> list[float]:
    """The mean scores of all rollouts of `STEPS` steps: the sooner the policy learns, the higher."""
    policy, played = Policy(Random(seed)), []
    earlier = deque([policy.parameters.copy()], maxlen=way.behind + 1)
    for _ in range(STEPS):
        sampler = Policy(policy.random, earlier[0])
        groups = problem.groups(sampler, way.groups)
        played += groups
        rollouts = []
        for group in [[*chain(*groups)]] if config.compare == "step" else groups:
            credit = group_credit([problem.sibling(episode, config) for episode in group], config)
            for episode, own in zip(group, credit, strict=True):
                calls = zip(episode.decisions, own, strict=True)
                rollouts.append([(*decision, of.advantage) for decision, of in calls if of])
        policy.learn(rollouts, config, sampler, rate)
        earlier.append(policy.parameters.copy())
    return mean_scores(played)


def mean_scores(groups: Sequence[Sequence[Episode]]) -> list[float]:
    return [fmean(scores) for scores in zip(*(one.scores for group in groups for one in group), strict=True)]


class Cell(NamedTuple):
    """The scores of each seed, and the rate."""

    seeds: list[list[float]]
    rate: float

    @property
    def means(self) -> list[float]:
        return [fmean(scores) for scores in self.seeds]

    @property
    def mean(self) -> float:
        return fmean(self.means)

    def text(self, best: Cell) -> str:
        """In bold if it is below the best by at most two standard errors of a difference, or 0.01."""
        scores = ", ".join(f"{fmean(of):.2f} ± {stdev(of):.2f}" for of in zip(*self.seeds, strict=True))
        margin = max(2 * math.sqrt(2 * variance(best.means) / len(SEEDS)), 0.01)
        return f"**{scores}** at {self.rate}" if self.mean >= best.mean - margin else f"{scores} at {self.rate}"


def at_best_rate(problem: Problem, settings: Mapping[str, object], way: Way) -> Cell:
    judge = {"judge": {"calls": {"model": "openai/scripted"}}} if settings.get("credit") == "judge" else {}
    config = Config.model_validate({"trainer": settings, **judge}).trainer

    def at(rate: float, seeds: Sequence[int]) -> Cell:
        return Cell([trained(problem, config, way, rate, seed) for seed in seeds], rate)

    return at(max((at(rate, CHOOSING) for rate in RATES), key=lambda cell: min(cell.means)).rate, SEEDS)


def show(
    page: Page, title: str, rows: Mapping[str, Mapping[str, object]], problems: Sequence[Problem], way: Way = Way()
) -> None:
    """Train on every problem with every row's settings, and add what came of it to the page."""
    asked = [(problem, settings, way) for settings in rows.values() for problem in problems]
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = pool.map(at_best_rate, *zip(*asked, strict=True))
        cells = list(track(found, title, len(asked), transient=True))
    wide = len(problems)
    best = [max(cells[i::wide], key=lambda cell: cell.mean) for i in range(wide)]
    shown = {name: cells[i * wide : (i + 1) * wide] for i, name in enumerate(rows)}
    texts = {name: [cell.text(top) for cell, top in zip(row, best, strict=True)] for name, row in shown.items()}
    before = (mean_scores(problem.groups(Policy(Random(0)), way.groups, 2500)) for problem in problems)
    untrained = (", ".join(f"{score:.2f}" for score in scores) for scores in before)
    head = (title, *(problem.title for problem in problems))
    page.table("", head, [["untrained", *untrained], *([name, *row] for name, row in texts.items())])
    nowhere = [name for name, row in texts.items() if not any("**" in text for text in row)]
    page.text([f"Among the best of no column: {', '.join(nowhere) or 'none'}."])


def _column(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def _call(position: int, state: int, action: int, agent: str | None) -> ModelCall:
    request = {"messages": [{"role": "user", "content": str(state)}]}
    response = {"choices": [{"message": {"role": "assistant", "content": str(action)}}]}
    return ModelCall(
        call_id=str(position), rollout_id="r", seq=position, agent=agent, endpoint="chat/completions", status="ok",
        model="policy", policy_version=0, policy_versions=(0,), request=request, response=response,
        prompt_token_ids=(state,), choices=(), usage=None, tool_calls=(), reward=None, trainable=True,
        untrainable_reason=None, error=None, http_status=200, started_at=0.0, ttft_ms=None, latency_ms=None,
        upstream=None, extends=None, superseded_by=None,
    )  # fmt: skip


ABOUT = [
    f"Mean score of all rollouts of {STEPS} steps of gradient descent; ±: standard deviation over {len(SEEDS)} seeds.",
    f"The rate is that of {', '.join(map(str, RATES))} of which the worst of {len(CHOOSING)} other seeds is best.",
    "Bold: below the best of the column by at most two standard errors; of two numbers, by their mean.",
    "",
    "`rae`, which is for games, compares a rollout with those of its step before it. A step has one task here.",
    "`echo` is not here: it learns from what tools write, and these problems have no tools.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option(parser)
    options = parser.parse_args()
    page = Page("What each credit strategy, choice of agents, baseline and loss learns at its best rate")
    page.text(ABOUT)
    show(page, "strategy", STRATEGIES, PROBLEMS)
    show(page, "strategy with a judge", JUDGES, PROBLEMS)
    show(page, "agents", AGENTS, TWO_AGENTS)
    show(page, "baseline", BASELINES, BASELINE_PROBLEMS, Way(groups=BASELINE_GROUPS))
    show(page, "rewards of two names", NAMES, [Problem("right, style", two_names)])
    show(page, f"loss, {BEHIND} steps behind", LOSSES, LOSS_PROBLEMS, Way(behind=BEHIND))
    page.save(options.page)


if __name__ == "__main__":
    main()
