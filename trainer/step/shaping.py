"""Shapes logits as vLLM's sampler shaped them before it sampled: penalties, biases, grammars, truncation.

The trained policy is then the distribution that was really sampled, under the weights of now. All of it is a function
of the tokens before and of the logits; the order is that of vLLM 0.32 (`vllm/v1/sample/sampler.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..rows.prefix_tree import Ints
from ..rows.sampling import is_installed
from ..types import Sample, Sampling

# The likeliest tokens are looked at first: sorting an entire vocabulary takes ten times as long.
_LIKELIEST = 1024

# A compiled grammar may take megabytes.
_KEPT_GRAMMARS = 100


class SampledPlace(NamedTuple):
    """Where a token was sampled: how, after which prompt and answer so far, and what a grammar allowed there.

    `allowed` is (V/32,) bits. `is_lost`: the grammar's replay came to its end before, so nothing is known.
    """

    sampling: Sampling
    prompt: Ints
    answer: Ints
    allowed: Tensor | None = None
    is_lost: bool = False


class _Answer(NamedTuple):
    """An answer that begins at `start` of its row's tokens, and what its grammar allowed."""

    sampling: Sampling
    tokens: Ints
    start: int
    masks: Masks | None

    def place(self, column: int) -> SampledPlace:
        allowed = None if self.masks is None else self.masks.at(column - self.start)
        is_lost = self.masks is not None and allowed is None
        return SampledPlace(
            self.sampling, self.tokens[: self.start], self.tokens[self.start : column], allowed, is_lost
        )


class Shaper:
    """Shapes the logits of one model, whose tokenizer knows the tokens of words, and those that end an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        self._tokenizer = tokenizer
        self._words: dict[tuple[str, ...], list[list[int]]] = {}
        self._ends = _ends(tokenizer, model)
        self.grammars = Grammars(tokenizer, model.config.get_text_config().vocab_size, self._ends)

    def places(self, samples: Sequence[Sample], rows: Ints, columns: Ints) -> list[SampledPlace | None]:
        """Return where the tokens at `rows` and `columns` were sampled; None for those that only have a temperature."""
        answers: dict[tuple[int, int], _Answer] = {}
        found: list[SampledPlace | None] = []
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            span = next((s for s in samples[row].shaped if s[0] <= column < s[1]), None)
            if span is None:
                found.append(None)
                continue
            if (row, span[0]) not in answers:
                answers[row, span[0]] = self._answer(samples[row], *span)
            found.append(answers[row, span[0]].place(column))
        return found

    def _answer(self, sample: Sample, start: int, end: int, sampling: Sampling) -> _Answer:
        tokens, masks = np.asarray(sample.token_ids[:end]), None
        if sampling.grammar is not None:
            masks = self.grammars.masks(sampling.grammar, sampling.stop_tokens, tokens[start:].tolist())
        return _Answer(sampling, tokens, start, masks)

    def before_temperature(self, logits: Tensor, places: Sequence[SampledPlace | None]) -> Tensor:
        """Return (K, V) logits with masks, biases and penalties. What a gradient flows through stays in the graph."""
        if not any(place is not None and _changes_logits(place) for place in places):
            return logits
        return torch.stack([row if p is None else self._shaped(row, p) for row, p in zip(logits, places, strict=True)])

    def _shaped(self, logits: Tensor, place: SampledPlace) -> Tensor:
        sampling = place.sampling
        forbidden = self._forbidden(logits, place)
        if forbidden is not None:
            logits = logits.masked_fill(forbidden, -torch.inf)
        if sampling.bias:
            ids, values = zip(*sampling.bias, strict=True)
            logits = logits.index_add(0, _ids(ids, logits), logits.new_tensor(values))
        return _penalised(logits, place)

    def _forbidden(self, logits: Tensor, place: SampledPlace) -> Tensor | None:
        """The tokens that cannot come here, as a mask; None if all can."""
        sampling, size = place.sampling, len(logits)
        forbidden = torch.zeros(size, dtype=torch.bool, device=logits.device)
        if place.allowed is not None:
            forbidden |= ~_unpacked(place.allowed.to(logits.device), size)
        if sampling.allowed is not None:
            forbidden |= ~forbidden.new_zeros(size).index_fill(0, _ids(sampling.allowed, logits), True)
        forbidden[_ids(self._bad_ends(place), logits)] = True
        if len(place.answer) < sampling.min_tokens:
            without_ends = forbidden.index_fill(0, _ids([*self._ends, *sampling.stop_tokens], logits), True)
            # Where a grammar allows nothing but the end, vLLM lets the answer end.
            forbidden = forbidden if bool(without_ends.all()) else without_ends
        return forbidden if forbidden.any() else None

    def _bad_ends(self, place: SampledPlace) -> list[int]:
        """The tokens that would complete a bad word."""
        answer = place.answer.tolist()
        words = self._bad_words(place.sampling.bad_words)
        return [word[-1] for word in words if answer[len(answer) - len(word) + 1 :] == word[:-1]]

    def _bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        """The words' tokens, at the beginning of a text and, where that is as many tokens, after a space."""
        if words not in self._words:
            found: list[list[int]] = []
            for word in words:
                at_start, after_space = (
                    self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
                )
                found += [at_start] if at_start else []
                if at_start and after_space and after_space[0] != at_start[0] and len(after_space) == len(at_start):
                    found.append(after_space)
            self._words[words] = found
        return self._words[words]


def truncate(logprobs: Tensor, places: Sequence[SampledPlace | None]) -> Tensor:
    """Return (K, V) log-probabilities after temperature, renormalised over what min_p, top_k and top_p leave."""
    rows = [i for i, place in enumerate(places) if place is not None and _truncates(place.sampling)]
    if not rows:
        return logprobs
    kept, how = logprobs[rows], [places[i].sampling for i in rows]  # type: ignore[union-attr]
    if any(s.min_p > 0 for s in how):
        min_p = kept.new_tensor([s.min_p for s in how])[:, None]
        kept = kept.masked_fill(kept < kept.amax(-1, keepdim=True) + min_p.log(), -torch.inf)
    if any(s.top_k > 0 for s in how):
        kept = _top_k(kept, [s.top_k for s in how])
    if any(s.top_p < 1 for s in how):
        kept = _top_p(kept - kept.logsumexp(-1, keepdim=True), kept.new_tensor([s.top_p for s in how])[:, None])
    return logprobs.index_copy(0, _ids(rows, logprobs), kept - kept.logsumexp(-1, keepdim=True))


def _top_k(logprobs: Tensor, ks: Sequence[int]) -> Tensor:
    vocabulary = logprobs.shape[-1]
    ks = [k if 0 < k < vocabulary else vocabulary for k in ks]
    likeliest = logprobs.topk(max(k for k in ks if k < vocabulary)).values if min(ks) < vocabulary else logprobs
    least = torch.stack(
        [row[k - 1] if k < vocabulary else -row.new_tensor(torch.inf) for row, k in zip(likeliest, ks, strict=True)]
    )
    return logprobs.masked_fill(logprobs < least[:, None], -torch.inf)


def _top_p(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """A token stays while the likelier ones sum to less than `top_p`."""
    for size in (min(_LIKELIEST, logprobs.shape[-1]), logprobs.shape[-1]):
        likeliest = logprobs.topk(size).values
        sums = likeliest.exp().cumsum(-1)
        if size == logprobs.shape[-1] or bool(((sums[:, -1:] >= top_p) | (top_p >= 1)).all()):
            break
    stays = sums - likeliest.exp() < top_p
    stays[:, 0] = True
    least = likeliest.masked_fill(~stays, torch.inf).amin(-1, keepdim=True)
    return logprobs.masked_fill((logprobs < least) & (top_p < 1), -torch.inf)


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
    masked = place.allowed is not None or s.allowed is not None or s.bad_words or s.min_tokens
    return bool(penalised or masked or s.bias)


def _truncates(sampling: Sampling) -> bool:
    return sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1


def _unpacked(bits: Tensor, size: int) -> Tensor:
    """(V/32,) words of 32 bits -> (V,) truth values, the lowest bit first."""
    return ((bits[:, None] >> torch.arange(32, device=bits.device)) & 1).bool().reshape(-1)[:size]


def _ids(values: Sequence[int] | Ints, like: Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.long, device=like.device)


def _ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation configuration."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    of_model = configured if isinstance(configured, list) else [configured]
    return sorted({end for end in (tokenizer.eos_token_id, *of_model) if end is not None})


class Masks(NamedTuple):
    """The tokens that a grammar allowed at each place of an answer, as bits (N, V/32), up to the first one refused."""

    allowed: Tensor

    def at(self, place: int) -> Tensor | None:
        return self.allowed[place] if place < len(self.allowed) else None


class Grammars:
    """Compiles grammars once. `ends` are the tokens that end an answer; a request may name more."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._compiler: Any = None
        self._compiled: dict[str, Any] = {}

    def masks(self, grammar: str, stop_tokens: Sequence[int], answer: Sequence[int]) -> Masks:
        """Replay `answer`. `grammar` is vLLM's structured outputs as JSON; without tokens if it cannot be compiled."""
        compiled = self._compile(grammar)
        if compiled is None:
            return Masks(torch.empty(0, 0, dtype=torch.int32))
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[*self._ends, *stop_tokens])
        masks = xgrammar.allocate_token_bitmask(len(answer), self._vocabulary)
        for place, token in enumerate(answer):
            if matcher.is_terminated():
                masks[place] = -1  # as vLLM: nothing is forbidden after the end
            else:
                matcher.fill_next_token_bitmask(masks, place)
                if not matcher.accept_token(token):
                    return Masks(masks[: place + 1])
        return Masks(masks)

    def _compile(self, grammar: str) -> Any:
        if grammar not in self._compiled:
            while len(self._compiled) >= _KEPT_GRAMMARS:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = self._try_to_compile(json.loads(grammar)) if is_installed() else None
        return self._compiled[grammar]

    def _try_to_compile(self, outputs: dict[str, Any]) -> Any:
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocabulary)
            self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        try:
            return _compiled_grammar(self._compiler, outputs)
        except (RuntimeError, ValueError, TypeError):  # xgrammar's words for a grammar that it does not take
            return None


def _compiled_grammar(compiler: Any, outputs: dict[str, Any]) -> Any:
    if (schema := outputs.get("json")) is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return compiler.compile_json_schema(text, any_whitespace=True)
    if outputs.get("json_object"):
        return compiler.compile_json_schema('{"type": "object"}', any_whitespace=True)
    if (regex := outputs.get("regex")) is not None:
        return compiler.compile_regex(regex)
    if (choice := outputs.get("choice")) is not None:
        return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, choice)))
    if (grammar := outputs.get("grammar")) is not None:
        return compiler.compile_grammar(grammar)
    return compiler.compile_structural_tag(outputs["structural_tag"])


def _literal(text: str) -> str:
    """A text in a grammar of EBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if ord(c) >= 32 and ord(c) != 127 else f"\\u{ord(c):04x}" for c in escaped) + '"'
