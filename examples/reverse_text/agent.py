# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.54.0"]
# ///
"""An agent of one call that writes a text backwards: `python agent.py "Ann sold 3 green maps."`."""

import os
import sys
from typing import Any

from openai import OpenAI

SYSTEM = "Write the user's text backwards, letter by letter, between <reversed_text> and </reversed_text>."
MAX_TOKENS = 128  # as prime-rl has it


def solve(task: dict[str, Any]) -> str:
    """The model's answer to `task["question"]`, the text."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    completion = OpenAI().chat.completions.create(
        model=os.environ.get("MODEL", "policy"), messages=messages, max_tokens=MAX_TOKENS, temperature=1
    )
    return completion.choices[0].message.content or ""


if __name__ == "__main__":
    print(solve({"question": sys.argv[1]}))
