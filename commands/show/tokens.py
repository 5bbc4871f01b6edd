"""Writes the tokens of a rollout's answers in a terminal: each with its log-probability, and how it was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import exp
from typing import Any

from rich.text import Text

from ..formats import number, plain

LIKELY, UNLIKELY = 0.9, 0.1


def token_lines(runs: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield lines of `GET /rollouts/{id}/tokens`: for each call a heading and its tokens."""
    taken = any(run["step"] is not None for run in runs)
    for run in runs:
        trained = f"trained in step {run['step']} with advantage {number(run['advantage'])}"
        is_left_out = taken and run["step"] is None
        fate = "left out" if is_left_out else "not trained" if run["step"] is None else trained
        yield Text(f"── call {run['seq']} ", "bold").append(f"{len(run['token_ids'])} tokens · {fate}", "not bold")
        yield from _tokens(run, "strike " if is_left_out else "")


def _tokens(run: Mapping[str, Any], style: str) -> Iterator[Text]:
    """The tokens in lines that end where the text's do."""
    texts = run["texts"] or [f" {token} " for token in run["token_ids"]]
    line = Text()
    for text, logprob in zip_longest(texts, run["logprobs"][: len(texts)]):  # an answer may have too few
        shown = "⋮" if text is None else text.replace("\n", "↵") or "∅"
        line.append_text(plain(shown, style + _style(logprob))).append(number(logprob, 2), "dim")
        line.append(" ")
        if text is not None and text.endswith("\n"):
            yield line
            line = Text()
    yield line


def _style(logprob: float | None) -> str:
    likely = 1.0 if logprob is None else exp(logprob)
    return "red" if likely < UNLIKELY else "yellow" if likely < LIKELY else "green"
