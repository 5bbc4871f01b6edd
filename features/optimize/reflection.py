"""Asks the model that reflects on rollouts. Answers are kept in a file first, so that a run can be resumed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ...core.errors import LightningError
from ...core.prices import Used, import_litellm, used
from ...store.sqlite.file import make_private
from .scores import BudgetSpent

TIMEOUT_S = 300.0
Answered = tuple[str, Any]  # an answer, and its usage


class Reflection:
    """`model` is litellm's name of it: `openai/gpt-5`, `anthropic/…`. Its key is where litellm looks for it.

    The n-th time that it gets the same text, it returns the n-th answer of the file, if there is one. After `most`
    answers, those of the file included, `ask` raises BudgetSpent. `used`: the tokens of all its answers so far, if they
    told.
    """

    def __init__(self, model: str, base_url: str | None, file: Path, most: int | None = None) -> None:
        self._model, self._base_url, self._file, self._most = model, base_url, file, most
        self._uses: Counter[str] = Counter()
        self._answers = _read(file)
        self.used = Used()

    async def ask(self, text: str) -> str:
        """Return the model's answer; LightningError if it gives none, BudgetSpent if it may not be asked again."""
        if self._most is not None and self._uses.total() >= self._most:
            raise BudgetSpent
        digest = hashlib.sha256(f"{self._model}\n{text}".encode(errors="surrogatepass")).hexdigest()
        key = f"{digest} {self._uses[digest] + 1}"
        if key not in self._answers:
            self._answers[key] = await self._complete(text)
            await asyncio.to_thread(self._keep, key)
        self._uses[digest] += 1
        answer, usage = self._answers[key]
        self.used = self.used.plus(used(usage) or Used())
        return answer

    async def _complete(self, text: str) -> Answered:
        litellm = import_litellm()
        from openai import OpenAIError

        messages = [{"role": "user", "content": text}]
        try:
            answer = await litellm.acompletion(
                self._model, messages=messages, base_url=self._base_url, timeout=TIMEOUT_S, num_retries=3
            )
        except OpenAIError as error:  # what all of litellm's errors are
            raise LightningError(f"{self._model} does not answer: {error}") from None
        content = answer.choices[0].message.content
        if not isinstance(content, str) or not content.strip():
            raise LightningError(f"{self._model} answered nothing")
        usage = getattr(answer, "usage", None)
        return content, usage and usage.model_dump()

    def _keep(self, key: str) -> None:
        answer, usage = self._answers[key]
        make_private(self._file)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": key, "answer": answer, "usage": usage}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(file: Path) -> dict[str, Answered]:
    """The answers in a file. Its last line may have been cut off."""
    answers: dict[str, Answered] = {}
    if file.exists():
        for line in file.read_text().split("\n"):
            try:
                kept = json.loads(line)
            except ValueError:
                continue
            answers[kept["key"]] = kept["answer"], kept.get("usage")
    return answers
