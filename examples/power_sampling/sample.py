"""Power sampling: answers in proportion to p(answer)^alpha, from a served model that samples in proportion to p.

"Reasoning with Sampling: Your Base Model is Smarter Than You Think" (Karan and Du 2025, https://arxiv.org/abs/2510.14901)
samples so by a Markov chain: it cuts the answer somewhere, samples what follows anew and keeps one of the two, over an
answer that grows block by block. The paper samples the new ending at temperature 1/alpha, which takes log-probabilities
at two temperatures. Here several endings are sampled from p itself, and one of them, or the old one, is drawn by its
weight p^(alpha-1): sampling-importance resampling (https://arxiv.org/abs/1312.6432), which leaves the same target.
"""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from openai import OpenAI

BLOCK = 192  # tokens; the paper's 3,072 in 16 blocks
MOVES = 10  # of the chain for each block, as in the paper
ENDINGS = 8  # at once: siblings that share their prompt cost little more than one


class Answer(NamedTuple):
    """Sampled tokens, the log-probability of each at temperature 1, and whether the model ended the answer."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    ended: bool = False


# (tokens so far, how many tokens an ending may have) -> endings sampled from the model, of one token at least
Propose = Callable[[Sequence[int], int], Sequence[Answer]]


def power_sample(
    propose: Propose, alpha: float, max_tokens: int, rng: random.Random, block: int = BLOCK, moves: int = MOVES
) -> Answer:
    """Return an answer of at most `max_tokens` tokens."""

    def endings(answer: Answer, cut: int, limit: int) -> list[Answer]:
        kept, logprobs = answer.tokens[:cut], answer.logprobs[:cut]
        return [Answer(kept + e.tokens, logprobs + e.logprobs, e.ended) for e in propose(kept, limit - cut)]

    def weight(answer: Answer, cut: int) -> float:
        """The logarithm of p^alpha over p, of the tokens after `cut`."""
        return (alpha - 1) * math.fsum(answer.logprobs[cut:])

    def draw(answers: Sequence[Answer], weights: Sequence[float]) -> Answer:
        return rng.choices(answers, [math.exp(one - max(weights)) for one in weights])[0]

    answer = Answer()
    while not answer.ended and len(answer.tokens) < max_tokens:
        start, limit = len(answer.tokens), min(len(answer.tokens) + block, max_tokens)
        longer = endings(answer, start, limit)
        answer = draw(longer, [weight(one, start) for one in longer])
        for _ in range(moves):
            cut = rng.randrange(len(answer.tokens))
            either = [answer, *endings(answer, cut, limit)]
            # An answer of n tokens is cut at this one with a chance of 1/n.
            answer = draw(either, [weight(one, cut) - math.log(len(one.tokens)) for one in either])
    return answer


class Served:
    """A model behind vLLM's OpenAI API, asked a question. `sampled` counts the tokens that it sampled."""

    def __init__(self, client: OpenAI, model: str, question: str) -> None:
        self._client, self._model, self.sampled = client, model, 0
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 1}
        first = client.chat.completions.create(model=model, extra_body={"return_token_ids": True}, **body)  # type: ignore
        self._prompt: list[int] = first.prompt_token_ids  # type: ignore[attr-defined]

    def propose(self, beginning: Sequence[int], tokens: int) -> list[Answer]:
        # p as it is: whatever the model's own defaults for sampling are.
        plain = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        found = self._client.completions.create(
            model=self._model, prompt=[*self._prompt, *beginning], n=ENDINGS, max_tokens=tokens,
            temperature=1.0, top_p=1.0, logprobs=0, extra_body=plain,
        )  # fmt: skip
        self.sampled += found.usage.completion_tokens if found.usage else 0
        return [
            Answer(tuple(one.token_ids), tuple(one.logprobs.token_logprobs), one.finish_reason != "length")  # type: ignore
            for one in found.choices
        ]

    def text(self, answer: Answer) -> str:
        """The answer's text, without the token that ended it: vLLM echoes tokens as text."""
        tokens = answer.tokens[:-1] if answer.ended else answer.tokens
        if not tokens:
            return ""
        return (
            self._client.completions.create(model=self._model, prompt=[*tokens], echo=True, max_tokens=0)
            .choices[0]
            .text
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("question")
    options.add_argument("--url", default="http://127.0.0.1:8100/v1", help="of the vLLM")
    options.add_argument("--model", help="by default the first that it serves")
    options.add_argument("--alpha", type=float, default=4.0, help="1 samples from the unchanged model")
    options.add_argument("--max-tokens", type=int, default=3072)
    options.add_argument("--seed", type=int, help="of the choices among what the model samples")
    chosen = options.parse_args()
    client = OpenAI(base_url=chosen.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = Served(client, chosen.model or client.models.list().data[0].id, chosen.question)
    answer = power_sample(model.propose, chosen.alpha, chosen.max_tokens, random.Random(chosen.seed))
    print(model.text(answer))
    print(f"{len(answer.tokens)} tokens of {model.sampled} sampled; log-probability {math.fsum(answer.logprobs):.1f}")


if __name__ == "__main__":
    main()
