"""Counts the tokens of calls and computes their cost, from `prices` in the configuration or litellm's price table.

Also imports litellm, which the extra `providers` installs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from operator import add
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .errors import ConfigError
from .json_text import loads

MILLION = 1_000_000
OWN_MACHINES = {"hosted_vllm", "vllm", "ollama", "ollama_chat", "lm_studio", "llamafile"}  # not priced by a bare name
_COSTS = (  # litellm's, in the order of `Price`
    "input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost", "cache_creation_input_token_cost"
)  # fmt: skip
_LITELLM_SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or importing it fetches a price list
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",  # or it reads a .env file
    "MAX_IMAGE_URL_DOWNLOAD_SIZE_MB": "0",  # a URL that an agent names is not called
}


class Used(NamedTuple):
    """Tokens of calls. `input` includes tokens read from a cache (`cached`) or written to it (`kept`).

    `reasoning`: the part of `output` that the agent may not see.
    """

    input: int = 0
    cached: int = 0
    kept: int = 0
    output: int = 0
    reasoning: int = 0

    def plus(self, other: Used) -> Used:
        """Return the sum of both."""
        return Used(*map(add, self, other))


def used(usage: Any) -> Used | None:
    """Return the tokens in a `usage` object; None if it has none.

    Anthropic's `input_tokens` leave out cached tokens: 10 of them and 90 `cache_read_input_tokens` are an input of 100.
    Some providers (xAI, Gemini) count reasoning only in `total_tokens`.
    """
    if not isinstance(usage, dict) or usage.keys().isdisjoint(("prompt_tokens", "input_tokens", "total_tokens")):
        return None
    given, said = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    read, kept = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    first = _count(usage, f"{given}_tokens") + (read + kept if given == "input" else 0)
    cached = read or _count(usage.get(f"{given}_tokens_details"), "cached_tokens")
    return Used(
        first,
        cached or _count(usage, "prompt_cache_hit_tokens"),  # DeepSeek's
        kept,
        max(_count(usage, f"{said}_tokens"), _count(usage, "total_tokens") - first),
        _count(usage.get(f"{said}_tokens_details"), "reasoning_tokens"),
    )


def _count(value: Any, name: str) -> int:
    """The count with this name; 0 if it is not a plausible count."""
    count = value.get(name) if isinstance(value, dict) else None
    return count if type(count) is int and 0 < count < 2**40 else 0


class Price(NamedTuple):
    """Prices in USD per million tokens."""

    input: float
    output: float
    cached: float
    kept: float

    def of(self, used: Used) -> float:
        """Return the cost of tokens in USD. Example: 1,000 input tokens at 3 USD per million cost 0.003 USD."""
        new = max(0, used.input - used.cached - used.kept) * self.input
        return (new + used.output * self.output + used.cached * self.cached + used.kept * self.kept) / MILLION


class Prices:
    """The prices of models. The first configured pattern that matches a name applies."""

    def __init__(self, configured: Mapping[str, Sequence[float]]) -> None:
        self._configured = configured
        self._known: dict[str | None, Price | None] = {}

    def of(self, model: str | None) -> Price | None:
        """Return a model's price; None if it is unknown. The first call may read a large file."""
        if model not in self._known:
            self._known[model] = None if model is None else self.configured(model) or _litellms(model)
        return self._known[model]

    def configured(self, model: str | None) -> Price | None:
        """Return the price in the configuration; None if no pattern matches."""
        for name, (first, output, *cached) in self._configured.items():
            if fnmatchcase(model or "", name):
                return Price(first, output, cached[0] if cached else first, first)
        return None


def _litellms(model: str) -> Price | None:
    """The price in litellm's table, by the full name or without its provider prefixes."""
    provider, _, rest = model.partition("/")
    called = [model] if provider in OWN_MACHINES else [model, rest, rest.rpartition("/")[2]]
    listed = next((found for name in called if isinstance(found := _table().get(name), dict)), {})
    if not isinstance(first := listed.get(_COSTS[0]), int | float):
        return None
    return Price(
        *(MILLION * (price if isinstance(price := listed.get(cost), int | float) else first) for cost in _COSTS)
    )


@cache
def _table() -> Mapping[str, Any]:
    """litellm's table, read from its file: importing litellm takes seconds."""
    spec = importlib.util.find_spec("litellm")
    for folder in (spec and spec.submodule_search_locations) or ():
        with suppress(OSError, ValueError):
            return dict(loads((Path(folder) / "model_prices_and_context_window_backup.json").read_bytes()))
    return {}


def require_litellm(what: str) -> None:
    """Raise ConfigError if litellm is not installed. `what`: the part that needs it."""
    if importlib.util.find_spec("litellm") is None:
        raise ConfigError(f"{what} needs litellm: pip install 'lightning-proxy[providers]'")


def import_litellm() -> ModuleType:
    """Import litellm and turn off its logs and reports, which may hold keys and entire conversations."""
    os.environ.update(_LITELLM_SETTINGS)
    import litellm

    litellm.suppress_debug_info = True
    litellm.turn_off_message_logging = True
    litellm.telemetry = False
    litellm.callbacks, litellm.success_callback, litellm.failure_callback = [], [], []
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).disabled = True
    return litellm
