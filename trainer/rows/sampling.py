"""Reads from a request how its answer was sampled. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..types import Sampling

Json = Mapping[str, Any]

# vLLM samples at this temperature where a lower one is asked for.
COLDEST = 0.01


def sampling_of(parameters: Json) -> Sampling | None:
    """Return how vLLM samples with these parameters, or None if they are of no use.

    They are vLLM's own sampling parameters, or the request, where an absent one is what OpenAI's API says. A request's
    grammar is not read here: vLLM makes it of more than one field.
    """
    grammar = parameters.get("structured_outputs")
    allowed = parameters.get("allowed_token_ids")
    try:
        return Sampling(
            temperature=_temperature(parameters),
            allowed=None if allowed is None else tuple(sorted(map(int, allowed))),
            bad_words=tuple(map(str, parameters.get("bad_words") or ())),
            min_tokens=int(parameters.get("min_tokens") or 0),
            stop_tokens=tuple(sorted(map(int, parameters.get("stop_token_ids") or ()))),
            # vLLM bounds a bias to what OpenAI's API allows.
            bias=tuple(sorted((int(k), _bounded(float(v))) for k, v in (parameters.get("logit_bias") or {}).items())),
            repetition_penalty=_number(parameters, "repetition_penalty", 1.0),
            frequency_penalty=_number(parameters, "frequency_penalty", 0.0),
            presence_penalty=_number(parameters, "presence_penalty", 0.0),
            min_p=_number(parameters, "min_p", 0.0),
            top_k=max(0, int(parameters.get("top_k") or 0)),
            top_p=_number(parameters, "top_p", 1.0),
            grammar=None if grammar is None else json.dumps(grammar, sort_keys=True),
        )
    except (TypeError, ValueError, AttributeError):
        return None


def _temperature(parameters: Json) -> float:
    temperature = _number(parameters, "temperature", 1.0)
    return max(temperature, COLDEST) if temperature > 0 else temperature


def _number(parameters: Json, name: str, neutral: float) -> float:
    value = parameters.get(name)
    return neutral if value is None else float(value)


def _bounded(bias: float) -> float:
    return min(100.0, max(-100.0, bias))
