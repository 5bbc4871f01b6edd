"""Replays an answer through the grammar that constrained it, with the engine that vLLM uses (xgrammar)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..rows.grammars import is_installed

# A compiled grammar may take megabytes.
_KEPT = 100


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
            while len(self._compiled) >= _KEPT:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = self._try_to_compile(json.loads(grammar)) if is_installed() else None
        return self._compiled[grammar]

    def _try_to_compile(self, outputs: dict[str, Any]) -> Any:
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocabulary)
            self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        try:
            return _compiled(self._compiler, outputs)
        except (RuntimeError, ValueError, TypeError):  # xgrammar's words for a grammar that it does not take
            return None


def _compiled(compiler: Any, outputs: dict[str, Any]) -> Any:
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
