"""Power sampling: answers in proportion to p(answer)^alpha, from a model that samples in proportion to p. Pure.

The target is that of "Reasoning with Sampling: Your Base Model is Smarter Than You Think" (Karan and Du 2025,
arXiv 2510.14901), reached as there by a Markov chain that cuts the answer somewhere, samples what follows anew and
keeps one of the two, over an answer that grows block by block. There the new ending is sampled at temperature 1/alpha,
which takes its log-probability at two temperatures; vLLM tells that of one. Here it is sampled from p itself, and in
place of one there are several, of which (or of which and the old one) one is drawn by its weight: iterated
sampling-importance resampling (Andrieu, Lee and Vihola 2018, arXiv 1312.6432). It leaves the same target unchanged.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

BLOCK = 192  # tokens; the paper's 3,072 in 16 blocks
MOVES = 10  # of the chain for each block, as in the paper
PROPOSALS = 8  # at once: siblings that share their prompt cost little more than one
NOT_ENDED = "length"


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """Sampled tokens and the log-probability of each at temperature 1; one that has ended cannot be continued.

    `stop`: the text that ended it, if it was one of the request's stop strings.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = NOT_ENDED
    stop: str | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason != NOT_ENDED

    @property
    def content_ids(self) -> tuple[int, ...]:
        """Return the answer's tokens without the one that ended it."""
        return self.token_ids[:-1] if self.ended and self.stop is None else self.token_ids

    def upto(self, cut: int) -> SampledAnswer:
        """Return the answer's first `cut` tokens."""
        return SampledAnswer(self.token_ids[:cut], self.logprobs[:cut])

    def followed_by(self, ending: SampledAnswer) -> SampledAnswer:
        tokens, logprobs = self.token_ids + ending.token_ids, self.logprobs + ending.logprobs
        return SampledAnswer(tokens, logprobs, ending.finish_reason, ending.stop)


# (tokens so far, how many endings, how many tokens each may have) -> endings sampled from the model, one token at least
Propose = Callable[[Sequence[int], int, int], Awaitable[Sequence[SampledAnswer]]]


@dataclass
class PowerSampler:
    """Samples one chain. `moves` counts its moves, `changes` those that changed the answer, `sampled` all tokens."""

    propose: Propose
    alpha: float
    rng: random.Random
    block: int = BLOCK
    moves_per_block: int = MOVES
    proposals: int = PROPOSALS
    moves: int = 0
    changes: int = 0
    sampled: int = 0

    async def sample(self, max_tokens: int) -> SampledAnswer:
        """Return an answer of at most `max_tokens` tokens."""
        answer = SampledAnswer()
        while not answer.ended and len(answer.token_ids) < max_tokens:
            limit = min(len(answer.token_ids) + self.block, max_tokens)
            endings = await self._endings(answer, limit)
            answer = self._draw(endings, [self._weight(ending, len(answer.token_ids)) for ending in endings])
            for _ in range(self.moves_per_block):
                answer = await self.move(answer, limit)
        return answer

    async def move(self, answer: SampledAnswer, limit: int) -> SampledAnswer:
        """Make one step of the chain over answers of at most `limit` tokens; it leaves p^alpha over them unchanged."""
        cut = self.rng.randrange(len(answer.token_ids))
        answers = [answer, *await self._endings(answer.upto(cut), limit)]
        # An answer of n tokens is cut at this one with a chance of 1/n.
        drawn = self._draw(answers, [self._weight(one, cut) - math.log(len(one.token_ids)) for one in answers])
        self.moves += 1
        self.changes += drawn is not answer
        return drawn

    async def _endings(self, beginning: SampledAnswer, limit: int) -> list[SampledAnswer]:
        left = limit - len(beginning.token_ids)
        endings = await self.propose(beginning.token_ids, self.proposals, left)
        self.sampled += sum(len(ending.token_ids) for ending in endings)
        return [beginning.followed_by(ending) for ending in endings]

    def _weight(self, answer: SampledAnswer, cut: int) -> float:
        """The logarithm of p^alpha over p, of the tokens after `cut`, which p has sampled already."""
        return (self.alpha - 1) * math.fsum(answer.logprobs[cut:])

    def _draw(self, answers: Sequence[SampledAnswer], weights: Sequence[float]) -> SampledAnswer:
        most = max(weights)
        return self.rng.choices(answers, [math.exp(weight - most) for weight in weights])[0]
