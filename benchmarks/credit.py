"""What each credit strategy, choice of agents, baseline and loss learns on small problems: five seeds each, in tables.

The policy is a table: a softmax over two actions for each state, trained by plain REINFORCE. Rollouts are the records
that the proxy would have made of it, and their advantages come from the trainer's own credit and baselines. A state is
all that the policy sees: in an agent whose prompts hold its whole history, `anchor` finds fewer calls to compare.
The judge is a script (scripted_judge.py). Losses take steps on rollouts of the policy as it was BEHIND steps ago: on
those of the present one all have the same gradient. Every decision is an answer of one token.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import torch
from results_page import Page, option
from rich.progress import track
from scripted_judge import judged

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.returns import Earned
from lightning_proxy.proxy.rewarders.config import JudgeKeys
from lightning_proxy.proxy.types import ModelCall
from lightning_proxy.trainer.credit import baselines as advantage
from lightning_proxy.trainer.credit.strategies import group_credit
from lightning_proxy.trainer.step.losses import policy_loss
from lightning_proxy.trainer.step.own_loss import own_loss
from lightning_proxy.trainer.types import RolloutRewards, Sibling

SEEDS = range(5)
SIBLINGS = 8
GROUPS = 100
RATE = 0.1
EVALUATED = 500  # rollouts after training

STRATEGIES = {
    "uniform": {"credit": "uniform"},
    "discounted, 1.0": {"credit": "discounted", "discount": 1.0},
    "discounted, 0.9": {"credit": "discounted", "discount": 0.9},
    "discounted, 0": {"credit": "discounted", "discount": 0.0},
    "anchor, 0.9": {"credit": "anchor", "discount": 0.9},
    "anchor, 0": {"credit": "anchor", "discount": 0.0},
    "rae": {"credit": "rae"},
    "judge, 0.9 (scripted)": {"credit": "judge", "discount": 0.9, "judge": {"model": "scripted"}},
    "judge, 0 (scripted)": {"credit": "judge", "discount": 0.0, "judge": {"model": "scripted"}},
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
SETTINGS = type(Config().trainer)  # with the keys and names of side rooms
BASELINES = {name: {"credit": "discounted", "discount": 0.9, "baseline": name} for name in SETTINGS.known("baseline")}
BASELINE_GROUPS = 4  # in a step: reinforce_pp compares all rollouts of it
OF_LOSSES = {"credit": "discounted", "discount": 0.9}
LOSSES = {
    **{name: {"loss_type": name, **OF_LOSSES} for name in ("cispo", "grpo", "sapo", "vespo")},
    **{name: {"loss": name, **OF_LOSSES} for name in SETTINGS.known("loss")},
}
LOSS_RATE = 4.0
BEHIND = 20  # steps


Advantages = Sequence[Sequence[float | None]]


class Policy:
    """The probability of action 1 in each state is the logistic function of the state's parameter."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.parameters: defaultdict[int, float] = defaultdict(float)

    def at(self, parameters: Mapping[int, float]) -> Policy:
        """Return the policy with other parameters, and the same chance."""
        other = Policy(0)
        other._random, other.parameters = self._random, defaultdict(float, parameters)
        return other

    def probability(self, state: int) -> float:
        return 1 / (1 + math.exp(-self.parameters[state]))

    def act(self, state: int) -> int:
        return int(self._random.random() < self.probability(state))

    def chance(self, probability: float) -> bool:
        """Chance of the world, from the policy's own seed."""
        return self._random.random() < probability

    def draw(self, kinds: int) -> int:
        return self._random.randrange(kinds)

    def learn(self, episodes: Sequence[Episode], advantages: Advantages, rate: float) -> None:
        """One step along the advantage-weighted gradient of log-probabilities, every rollout with the same weight."""
        steps: defaultdict[int, float] = defaultdict(float)
        for episode, own in zip(episodes, advantages, strict=True):
            trained = [(decision, a) for decision, a in zip(episode.decisions, own, strict=True) if a is not None]
            for (state, action), of_call in trained:
                steps[state] += of_call * (action - self.probability(state)) / len(trained)
        for state, step in steps.items():
            self.parameters[state] += rate * step

    def learn_by_loss(
        self, episodes: Sequence[Episode], advantages: Sequence[Sequence[float]], config: JudgeKeys, sampler: Policy
    ) -> None:
        """One step down the gradient of the trainer's loss; every rollout weighs the same, whichever loss it is."""
        decisions = [decision for episode in episodes for decision in episode.decisions]
        states = sorted({state for state, _ in decisions})
        parameters = torch.tensor([self.parameters[state] for state in states], requires_grad=True)
        sampled = torch.tensor([sampler.parameters[state] for state in states])
        places = torch.tensor([states.index(state) for state, _ in decisions])
        signs = torch.tensor([[2.0 * action - 1] for _, action in decisions])
        logprobs, before = (
            torch.nn.functional.logsigmoid(signs * values[places, None]) for values in (parameters, sampled)
        )
        lengths = [len(episode.decisions) for episode in episodes for _ in episode.decisions]
        inputs = {
            "completion_mask": torch.ones_like(before),
            "old_per_token_logps": before,
            "advantages": torch.tensor([[value] for own in advantages for value in own]),
            "token_weights": 1 / torch.tensor(lengths)[:, None] / len(episodes),
        }
        (own_loss if config.loss else policy_loss)(logprobs, inputs, config).backward()
        assert parameters.grad is not None
        for state, slope in zip(states, parameters.grad.tolist(), strict=True):
            self.parameters[state] -= LOSS_RATE * slope


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

    def sibling(self, episode: Episode, config: JudgeKeys) -> Sibling:
        found = episode.sibling()
        return judged(found, config, self.idle) if config.judged else found


def delayed(policy: Policy) -> Episode:
    """Six questions, each with a right answer; what share was right is said at the end only."""
    episode = Episode()
    episode.final = episode.score = fmean(episode.act(policy, state) for state in range(6))
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
    kinds = [policy.draw(4) for _ in range(3)]
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
    """A corridor of eight rooms: action 1 goes on, 0 back to the room before; 1 for its end within 30 calls, else 0."""
    episode, room = Episode(final=0.0), 0
    for _ in range(30):
        room = room + 1 if episode.act(policy, room) else max(0, room - 1)
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


PROBLEMS = (
    Problem("delayed reward", delayed),
    Problem("noisy reward of each action", noisy),
    Problem("states of differing worth", varied),
    Problem("equal sums, sooner is better", early, frozenset({1})),
    Problem("sparse, long horizon", sparse),
)
LOSS_PROBLEMS = (PROBLEMS[0], PROBLEMS[2], PROBLEMS[4])
TWO_AGENTS = (
    Problem("each is rewarded: planner, executor", each_rewarded),
    Problem("the executor is rewarded for both: planner, executor", last_rewarded),
)


def trained(problem: Problem, config: JudgeKeys, seed: int, groups: int) -> list[float]:
    """The mean scores of a policy that was trained on `GROUPS` groups, `groups` in a step."""
    policy = Policy(seed)
    # Anchor's advantages are sums of two: it is not to win by longer steps.
    rate = RATE / (1 + config.anchor_weight) if config.credit == "anchor" else RATE
    for _ in range(GROUPS // groups):
        episodes = [[problem.play(policy) for _ in range(SIBLINGS)] for _ in range(groups)]
        if config.baseline in advantage.ACROSS_TASKS:
            episodes = [[episode for group in episodes for episode in group]]
        siblings = [[problem.sibling(episode, config) for episode in group] for group in episodes]
        advantages = [
            [[one and one.advantage for one in own] for own in group_credit(group, config)] for group in siblings
        ]
        for group, own in zip(episodes, advantages, strict=True):
            policy.learn(group, own, rate)
    return mean_scores(problem, policy, EVALUATED)


def trained_by_loss(problem: Problem, config: JudgeKeys, seed: int, behind: int) -> list[float]:
    """The mean scores of a policy that takes `GROUPS` steps by the configured loss, on rollouts `behind` steps old."""
    policy = Policy(seed)
    earlier = deque([dict(policy.parameters)], maxlen=behind + 1)
    for _ in range(GROUPS):
        sampler = policy.at(earlier[0])
        episodes = [problem.play(sampler) for _ in range(SIBLINGS)]
        credit = group_credit([problem.sibling(episode, config) for episode in episodes], config)
        advantages = [[one.advantage if one else 0.0 for one in own] for own in credit]
        policy.learn_by_loss(episodes, advantages, config, sampler)
        earlier.append(dict(policy.parameters))
    return mean_scores(problem, policy, EVALUATED)


def mean_scores(problem: Problem, policy: Policy, rollouts: int) -> list[float]:
    return [fmean(scores) for scores in zip(*(problem.play(policy).scores for _ in range(rollouts)), strict=True)]


def show(
    page: Page, title: str, rows: Mapping[str, Mapping[str, object]], problems: Sequence[Problem], groups: int = 1,
    way: Callable[[Problem, JudgeKeys, int, int], list[float]] = trained,
) -> None:  # fmt: skip
    """Train on every problem with every row's settings, and add what came of it to the page."""
    before = [[f"{score:.2f}" for score in mean_scores(problem, Policy(0), 5 * EVALUATED)] for problem in problems]
    cells = {"untrained": before}
    for name, settings in track(rows.items(), description=title, transient=True):
        config = JudgeKeys.of(SETTINGS.model_validate(settings))
        cells[name] = [
            [f"{fmean(of):.2f} ± {stdev(of):.2f}" for of in zip(*seeds, strict=True)]
            for problem in problems
            for seeds in [[way(problem, config, seed, groups) for seed in SEEDS]]
        ]
    head = (title, *(problem.title for problem in problems))
    page.table("", head, ([name, *(", ".join(scores) for scores in row)] for name, row in cells.items()))


def _call(position: int, state: int, action: int, agent: str | None) -> ModelCall:
    request = {"messages": [{"role": "user", "content": str(state)}]}
    response = {"choices": [{"message": {"role": "assistant", "content": str(action)}}]}
    return ModelCall(
        str(position), "r", position, agent, "chat.completions", "ok", "policy", 0, (0,), request, response, (state,),
        (), None, (), None, True, None, None, 200, 0.0, None, None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option(parser, "credit")
    options = parser.parse_args()
    page = Page("What each credit strategy, choice of agents and baseline learns")
    show(page, "strategy", STRATEGIES, PROBLEMS)
    show(page, "agents", AGENTS, TWO_AGENTS)
    show(page, "baseline", BASELINES, PROBLEMS, BASELINE_GROUPS)
    show(page, "rewards of two names", NAMES, [Problem("right, style", two_names)])
    show(page, f"loss, {BEHIND} steps behind", LOSSES, LOSS_PROBLEMS, BEHIND, trained_by_loss)
    page.save(options.page)


if __name__ == "__main__":
    main()
