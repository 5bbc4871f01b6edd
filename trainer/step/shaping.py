"""Shapes logits as vLLM's sampler shaped them before it sampled: penalties, biases, grammars, truncation.

The trained policy is then the distribution that was really sampled, under the current weights. All of it is a function
of the earlier tokens and the logits; the order is that of vLLM 0.32 (`vllm/v1/sample/sampler.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..rows.prefix_tree import Ints
from ..rows.sampling import is_installed
from ..types import Sample, Sampling

_LIKELIEST = 1024  # tokens that are looked at first: sorting an entire vocabulary takes ten times as long
_KEPT_GRAMMARS = 100  # compiled, each may take megabytes


class SampledPlace(NamedTuple):
    """How a token was sampled, after which prompt and partial answer, and what a grammar allowed there.

    `allowed` is (1, V/32) bits, or None without a grammar. It has no row if the grammar could not be replayed that far.
    """

    sampling: Sampling
    prompt: Ints
    answer: Ints
    allowed: Tensor | None = None

    @property
    def is_lost(self) -> bool:
        return self.allowed is not None and not len(self.allowed)


class Shaper:
    """Shapes the logits of one model. Its tokenizer and generation config say which tokens end an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        configured = getattr(model.generation_config, "eos_token_id", None)
        of_model = configured if isinstance(configured, list) else [configured]
        self._ends = sorted({end for end in (tokenizer.eos_token_id, *of_model) if end is not None})
        self._tokenizer, self._vocabulary = tokenizer, int(model.config.get_text_config().vocab_size)
        self._compiler: Any = None
        self._compiled = lru_cache(_KEPT_GRAMMARS)(self._compile)

    def places(self, samples: Sequence[Sample], places: Sequence[tuple[int, int]]) -> list[SampledPlace | None]:
        """Return how each token at (row, column) was sampled; None for tokens sampled by temperature alone."""
        answers: dict[tuple[int, int], tuple[Ints, Tensor | None]] = {}
        found: list[SampledPlace | None] = []
        for row, column in places:
            span = next((s for s in samples[row].shaped if s[0] <= column < s[1]), None)
            if span is None:
                found.append(None)
                continue
            start, end, sampling = span
            if (row, start) not in answers:
                ids = samples[row].token_ids[:end]
                answers[row, start] = np.asarray(ids), self.masks(sampling, ids[start:])
            tokens, masks = answers[row, start]
            allowed = None if masks is None else masks[column - start : column - start + 1]
            found.append(SampledPlace(sampling, tokens[:start], tokens[start:column], allowed))
        return found

    def before_temperature(self, logits: Tensor, places: Sequence[SampledPlace | None]) -> Tensor:
        """Return (K, V) logits with masks, biases and penalties applied. Gradients flow through them."""
        if not any(place is not None and _changes_logits(place) for place in places):
            return logits
        return torch.stack([row if p is None else self._shaped(row, p) for row, p in zip(logits, places, strict=True)])

    def _shaped(self, logits: Tensor, place: SampledPlace) -> Tensor:
        logits = logits.masked_fill(self._forbidden(logits, place), -torch.inf)
        if place.sampling.bias:
            ids, values = zip(*place.sampling.bias, strict=True)
            logits = logits.index_add(0, _ids(ids, logits), logits.new_tensor(values))
        return _penalised(logits, place)

    def _forbidden(self, logits: Tensor, place: SampledPlace) -> Tensor:
        """The tokens that cannot be sampled here, as a mask."""
        sampling, size = place.sampling, len(logits)
        forbidden = torch.zeros(size, dtype=torch.bool, device=logits.device)
        if place.allowed is not None and not place.is_lost:
            bits = place.allowed[0].to(logits.device)[:, None]  # the lowest of 32 comes first
            forbidden |= ~((bits >> torch.arange(32, device=bits.device)) & 1).bool().flatten()[:size]
        if sampling.allowed is not None:
            forbidden |= ~forbidden.new_zeros(size).index_fill(0, _ids(sampling.allowed, logits), True)
        if len(place.answer) < sampling.min_tokens:
            without_ends = forbidden.index_fill(0, _ids([*self._ends, *sampling.stop_tokens], logits), True)
            # Where a grammar allows nothing but the end, vLLM lets the answer end.
            forbidden = forbidden if bool(without_ends.all()) else without_ends
        return forbidden

    def masks(self, sampling: Sampling, answer: Sequence[int]) -> Tensor | None:
        """Return what the grammar allowed at each token of an answer, as bits (N, V/32), up to the first refused token.

        Return None if there is no grammar, and no rows if it cannot be compiled.
        """
        if sampling.grammar is None:
            return None
        compiled = self._compiled(sampling.grammar)
        if compiled is None:
            return torch.empty(0, 0, dtype=torch.int32)
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[*self._ends, *sampling.stop_tokens])
        masks: Tensor = xgrammar.allocate_token_bitmask(len(answer), self._vocabulary)
        for place, token in enumerate(answer):
            if matcher.is_terminated():
                masks[place] = -1  # as vLLM: nothing is forbidden after the end
            else:
                matcher.fill_next_token_bitmask(masks, place)
                if not matcher.accept_token(token):
                    return masks[: place + 1]
        return masks

    def _compile(self, grammar: str) -> Any:
        """Compile a grammar (vLLM's structured outputs, as JSON). Return None if xgrammar is missing or refuses it."""
        if not is_installed():
            return None
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocabulary)
            self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        try:
            return _compiled_grammar(self._compiler, json.loads(grammar))
        except (RuntimeError, ValueError, TypeError):  # xgrammar's words for a grammar that it does not take
            return None


def truncate(logprobs: Tensor, places: Sequence[SampledPlace | None]) -> Tensor:
    """Renormalise (K, V) log-probabilities over the tokens that min_p, top_k and top_p keep; the rest get -inf."""
    alike: dict[tuple[float, int, float], list[int]] = {}
    for row, place in enumerate(places):
        if place is not None:
            s = place.sampling
            alike.setdefault((s.min_p, s.top_k, s.top_p), []).append(row)
    alike.pop((0.0, 0, 1.0), None)  # nothing is cut
    for limits, rows in alike.items():
        index = _ids(rows, logprobs)
        logprobs = logprobs.index_copy(0, index, _truncated(logprobs[index], *limits))
    return logprobs


def _truncated(logprobs: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    vocabulary = logprobs.shape[-1]
    if min_p > 0:
        logprobs = logprobs.masked_fill(logprobs < logprobs.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    if 0 < top_k < vocabulary:
        logprobs = logprobs.masked_fill(logprobs < logprobs.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:  # a token stays while the likelier ones sum to less
        logprobs = logprobs.log_softmax(-1)
        for size in (min(_LIKELIEST, vocabulary), vocabulary):
            likeliest = logprobs.topk(size).values
            probs = likeliest.exp()
            sums = probs.cumsum(-1)
            if bool((sums[:, -1] >= top_p).all()):
                break
        stays = sums - probs < top_p
        stays[:, 0] = True
        least = likeliest.masked_fill(~stays, torch.inf).amin(-1, keepdim=True)
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    return logprobs.log_softmax(-1)


def _penalised(logits: Tensor, place: SampledPlace) -> Tensor:
    sampling = place.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        seen[_ids(place.prompt, logits)] = seen[_ids(place.answer, logits)] = True
        factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits = torch.where(seen, logits * factor, logits)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = torch.bincount(_ids(place.answer, logits), minlength=len(logits))
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return logits


def _changes_logits(place: SampledPlace) -> bool:
    s = place.sampling
    penalised = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
    masked = place.allowed is not None or s.allowed is not None or s.min_tokens
    return bool(penalised or masked or s.bias)


def _ids(values: Sequence[int] | Ints, like: Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.long, device=like.device)


def _compiled_grammar(compiler: Any, outputs: dict[str, Any]) -> Any:
    if (schema := outputs.get("json")) is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return compiler.compile_json_schema(text, any_whitespace=True)
    if outputs.get("json_object"):
        return compiler.compile_json_schema('{"type": "object"}', any_whitespace=True)
    if (regex := outputs.get("regex")) is not None:
        return compiler.compile_regex(regex)
    if (choice := outputs.get("choice")) is not None:
        literals = (json.dumps(text, ensure_ascii=False) for text in choice)
        return compiler.compile_grammar("root ::= " + " | ".join(literals))
    if (grammar := outputs.get("grammar")) is not None:
        return compiler.compile_grammar(grammar)
    return compiler.compile_structural_tag(outputs["structural_tag"])
