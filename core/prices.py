"""Says what tokens cost: by `prices` of the configuration, or by the price table of litellm where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .json_text import loads
from .usage import Used

MILLION = 1_000_000
OWN_MACHINES = {"hosted_vllm", "vllm", "ollama", "ollama_chat", "lm_studio", "llamafile"}  # whatever their models are


class Price(NamedTuple):
    """USD for a million tokens."""

    input: float
    output: float
    cached: float
    kept: float

    def of(self, used: Used) -> float:
        """Return what tokens cost. Example: 1,000 tokens of input at 3 USD cost 0.003 USD."""
        new = max(0, used.input - used.cached - used.kept) * self.input
        return (new + used.output * self.output + used.cached * self.cached + used.kept * self.kept) / MILLION


class Prices:
    """The prices of models. The first pattern of the configuration that fits a name counts."""

    def __init__(self, configured: Mapping[str, Sequence[float]]) -> None:
        self._configured = configured
        self._known: dict[str | None, Price | None] = {}

    def of(self, model: str | None) -> Price | None:
        """Return a model's price; None if nobody knows it. It reads a table once, so not on the way of a call."""
        if model not in self._known:
            self._known[model] = None if model is None else self.configured(model) or _litellms(model)
        return self._known[model]

    def configured(self, model: str | None) -> Price | None:
        """Return the price in the configuration."""
        found = next((price for name, price in self._configured.items() if fnmatchcase(model or "", name)), None)
        if found is None:
            return None
        first, output, *cached = found
        return Price(first, output, cached[0] if cached else first, first)


def _litellms(model: str) -> Price | None:
    """The price in litellm's table, by the whole name, or without its providers."""
    table, (provider, _, rest) = _table(), model.partition("/")
    called = [model] if provider in OWN_MACHINES else [model, rest, rest.rpartition("/")[2]]
    found = next((table[name] for name in called if name in table), None)
    if not isinstance(found, dict) or not isinstance(first := found.get("input_cost_per_token"), int | float):
        return None
    names = ("output_cost_per_token", "cache_read_input_token_cost", "cache_creation_input_token_cost")
    others = [found.get(name) for name in names]
    output, cached, kept = (one if isinstance(one, int | float) else first for one in others)
    return Price(*(MILLION * price for price in (first, output, cached, kept)))


@cache
def _table() -> Mapping[str, Any]:
    """litellm's own copy of its table: importing litellm, which loads it, takes seconds."""
    spec = importlib.util.find_spec("litellm")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            return dict(loads((Path(folder) / "model_prices_and_context_window_backup.json").read_bytes()))
        except (OSError, ValueError):
            continue
    return {}
