"""When each credit strategy pays: strategy x small learning problem, final reward over five seeds, as a Markdown table.

The policy is a table: a softmax over two actions for each state, trained by plain REINFORCE. Rollouts are the records
that the proxy would have made of it, and their advantages come from the trainer's own credit and baselines. A state is
all that the policy sees: in an agent whose prompts hold its whole history, `anchor` finds fewer calls to compare.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from rich.progress import track

from lightning_proxy.proxy.config import TrainerConfig
from lightning_proxy.proxy.types import ModelCall
from lightning_proxy.trainer.credit import Sibling, group_advantages
from lightning_proxy.trainer.rewards import RolloutRewards

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
}


class Policy:
    """The probability of action 1 in each state is the logistic function of the state's parameter."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._parameters: defaultdict[int, float] = defaultdict(float)

    def probability(self, state: int) -> float:
        return 1 / (1 + math.exp(-self._parameters[state]))

    def act(self, state: int) -> int:
        return int(self._random.random() < self.probability(state))

    def chance(self, probability: float) -> bool:
        """Chance of the world, from the policy's own seed."""
        return self._random.random() < probability

    def draw(self, kinds: int) -> int:
        return self._random.randrange(kinds)

    def learn(self, episodes: Sequence[Episode], advantages: Sequence[Sequence[float]], rate: float) -> None:
        """One step along the advantage-weighted gradient of log-probabilities, every rollout with the same weight."""
        steps: defaultdict[int, float] = defaultdict(float)
        for episode, own in zip(episodes, advantages, strict=True):
            for (state, action), advantage in zip(episode.decisions, own, strict=True):
                steps[state] += advantage * (action - self.probability(state)) / len(episode.decisions)
        for state, step in steps.items():
            self._parameters[state] += rate * step


@dataclass
class Episode:
    """A rollout in the making: (state, action) of each call, the rewards of calls by position, the rollout's own.

    `score`: how well it went, from 0 to 1, without the noise of rewards.
    """

    decisions: list[tuple[int, int]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    final: float | None = None
    score: float = 0.0

    def act(self, policy: Policy, state: int) -> int:
        self.decisions.append((state, policy.act(state)))
        return self.decisions[-1][1]

    def sibling(self) -> Sibling:
        calls = [_call(str(i), state) for i, (state, _) in enumerate(self.decisions)]
        return Sibling(calls, RolloutRewards(self.final, {str(i): r for i, r in self.rewards.items()}))


@dataclass(frozen=True)
class Problem:
    title: str
    play: Callable[[Policy], Episode]


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


def sparse(policy: Policy) -> Episode:
    """A corridor of eight rooms: action 1 goes on, 0 back to the room before; 1 for its end within 30 calls, else 0."""
    episode, room = Episode(final=0.0), 0
    for _ in range(30):
        room = room + 1 if episode.act(policy, room) else max(0, room - 1)
        if room == 8:
            episode.final = episode.score = 1.0
            break
    return episode


PROBLEMS = (
    Problem("delayed reward", delayed),
    Problem("noisy reward of each action", noisy),
    Problem("states of differing worth", varied),
    Problem("equal sums, sooner is better", early),
    Problem("sparse, long horizon", sparse),
)


def trained(problem: Problem, config: TrainerConfig, seed: int) -> float:
    """The mean score of a policy that was trained on `GROUPS` groups."""
    policy = Policy(seed)
    # Anchor's advantages are sums of two: it is not to win by longer steps.
    rate = RATE / (1 + config.anchor_weight) if config.credit == "anchor" else RATE
    for _ in range(GROUPS):
        episodes = [problem.play(policy) for _ in range(SIBLINGS)]
        policy.learn(episodes, group_advantages([episode.sibling() for episode in episodes], config), rate)
    return fmean(problem.play(policy).score for _ in range(EVALUATED))


def untrained(problem: Problem) -> float:
    return fmean(problem.play(policy).score for policy in [Policy(0)] for _ in range(5 * EVALUATED))


def _call(call_id: str, state: int) -> ModelCall:
    return ModelCall(
        call_id, "r", int(call_id), None, "chat.completions", "ok", "policy", 0, (0,), {}, {}, (state,), (), None, (),
        None, True, None, None, 200, 0.0, None, None,
    )  # fmt: skip


def main() -> None:
    rows = []
    for name, settings in track(STRATEGIES.items(), description="training", transient=True):
        config = TrainerConfig.model_validate(settings)
        cells = []
        for problem in PROBLEMS:
            scores = [trained(problem, config, seed) for seed in SEEDS]
            cells.append(f"{fmean(scores):.2f} ± {stdev(scores):.2f}")
        rows.append([name, *cells])
    print("| strategy |", " | ".join(problem.title for problem in PROBLEMS), "|")
    print("|---|" + "---|" * len(PROBLEMS))
    for row in (["untrained", *(f"{untrained(problem):.2f}" for problem in PROBLEMS)], *rows):
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
