"""An agent that adds two numbers, and its evaluator. OPENAI_BASE_URL says which endpoint serves it."""

import json
import math
import os
import re
import urllib.request
from collections.abc import Callable

from openai import OpenAI


def answer(a: int, b: int) -> str:
    """Ask the model; everything about the endpoint comes from the environment."""
    completion = OpenAI().chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": f"What is {a}+{b}? Answer with just the number."}],
        max_tokens=16,
        temperature=1,
    )
    return completion.choices[0].message.content or ""


def score(text: str, right: int) -> float:
    """1 for exactly the number, 0.2 to 0.6 for another bare number, 0.1 for the right one inside a sentence, else 0."""
    text = text.strip()
    if re.fullmatch(r"\d{1,9}", text):
        return 1.0 if int(text) == right else 0.2 + 0.4 * math.exp(-abs(int(text) - right) / 3)
    return 0.1 if str(right) in re.findall(r"\d+", text) else 0.0


def post_reward(reward: float, comment: str) -> None:
    """Tell the proxy what the rollout was worth."""
    body = {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": reward, "source": "env", "comment": comment}
    request = urllib.request.Request(
        os.environ["LIGHTNING_URL"] + "/reward",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    urllib.request.urlopen(request, timeout=60).close()


def main(ask: Callable[[int, int], str]) -> None:
    task = json.loads(os.environ["LIGHTNING_TASK"])
    a, b = task["a"], task["b"]
    text = ask(a, b)
    reward = score(text, a + b)
    post_reward(reward, comment="exact" if reward == 1 else f"{a}+{b} is {a + b}, and just that: not {text[:80]!r}")


if __name__ == "__main__":
    main(answer)
