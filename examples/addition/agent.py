"""Has a model add two numbers, and posts what its answer is worth."""

import json
import os
from difflib import SequenceMatcher

from openai import OpenAI

from lightning_proxy import client


def reward(text: str, right: str) -> float:
    """1 for the right answer and nothing else; else how similar the text is to it."""
    return SequenceMatcher(None, text.strip(), right).ratio()


if __name__ == "__main__":
    task = json.loads(os.environ["LIGHTNING_TASK"])
    messages = [{"role": "user", "content": task["question"]}]
    answer = OpenAI().chat.completions.create(model="policy", messages=messages, max_tokens=10)
    client.emit_reward(reward(answer.choices[0].message.content or "", task["answer"]))
