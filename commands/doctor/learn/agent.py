"""The agent of `doctor --learn`, where the user names none: `agent.py MODEL` has a conversation of two turns."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

TOKENS = 12
MORE = "Say it in another way."


def main() -> None:
    prompt = prompt_of(Path(os.environ["LIGHTNING_TASK_FILE"]).read_text())
    messages = [{"role": "user", "content": prompt}]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    for _ in range(2):
        body = {"model": sys.argv[1], "messages": messages, "max_tokens": TOKENS, "temperature": 1.0}
        url, data = f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            message = json.load(answer)["choices"][0]["message"]
        said = {"role": "assistant", "content": message.get("content") or ""}
        messages += [said, {"role": "user", "content": MORE}]


def prompt_of(line: str) -> str:
    """Return a task's prompt: its `prompt` or `question`, or else its first text; the whole line without one.

    >>> prompt_of('{"task_id": "7", "question": "Why?"}')
    'Why?'
    """
    task: dict[str, Any] = json.loads(line)
    texts = {name: value for name, value in task.items() if isinstance(value, str) and name != "task_id"}
    return texts.get("prompt") or texts.get("question") or next(iter(texts.values()), line)


if __name__ == "__main__":
    main()
