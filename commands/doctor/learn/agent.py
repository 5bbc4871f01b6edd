"""The agent and the tasks that `doctor --learn` has where the user names none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from ...run.tasks import Task

TOKENS = 12
PROMPTS = (
    "Name an animal and say what it does.",
    "Describe the sea in a few words.",
    "What is good to eat in the morning?",
    "Tell me something about the moon.",
)
MORE = "Say it in another way."


def own_tasks() -> list[Task]:
    """Return tasks that a model answers in many ways."""
    return [Task(f"doctor-{i}", json.dumps({"prompt": prompt})) for i, prompt in enumerate(PROMPTS)]


class BuiltInAgent:
    """A conversation of two turns, in place of a program. It is a `Runner`."""

    def __init__(self, model: str, session: aiohttp.ClientSession) -> None:
        self._model, self._session = model, session

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        """Ask twice. `log` gets an answer that is none."""
        url, key = env["OPENAI_BASE_URL"], {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        messages = [{"role": "user", "content": prompt_of(env["LIGHTNING_TASK"])}]
        for _ in range(2):
            body = {"model": self._model, "messages": messages, "max_tokens": TOKENS, "temperature": 1.0}
            async with self._session.post(f"{url}/chat/completions", json=body, headers=key) as answer:
                if answer.status != 200:
                    log.write_text(f"HTTP {answer.status}: {(await answer.text())[:500]}")
                    return 1
                message = (await answer.json())["choices"][0]["message"]
            said = {"role": "assistant", "content": message.get("content") or ""}
            messages += [said, {"role": "user", "content": MORE}]
        return 0

    async def close(self) -> None:
        return


def prompt_of(line: str) -> str:
    """Return a task's prompt: its `prompt` or `question`, or else its first text; the whole line without one.

    >>> prompt_of('{"task_id": "7", "question": "Why?"}')
    'Why?'
    """
    task: dict[str, Any] = json.loads(line)
    texts = {name: value for name, value in task.items() if isinstance(value, str) and name != "task_id"}
    return texts.get("prompt") or texts.get("question") or next(iter(texts.values()), line)
