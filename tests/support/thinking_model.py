"""The spelling model with tokens that begin and end a thought, for vLLM's parsers of reasoning."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from support.spelling_model import KNOWN, LIKELIER, save_spelling_model

# Tokens of SmolLM2's that nothing uses here, and what they are instead.
RENAMED = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}


def save_thinking_model(directory: Path) -> Path:
    save_spelling_model(directory)
    file = directory / "tokenizer.json"
    text = file.read_text()
    for unused, name in RENAMED.items():
        text = text.replace(unused, name)
    tokenizer = json.loads(text)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in RENAMED.values()  # or nobody would see them
    file.write_text(json.dumps(tokenizer))
    return directory


def save_reciting_model(directory: Path, recited: list[str]) -> Path:
    """The thinking model, which says one token after the other where nothing forbids them; no token twice."""
    vocabulary = Tokenizer.from_file(str(save_thinking_model(directory) / "tokenizer.json")).get_vocab()
    tokens = [vocabulary[token] for token in recited]
    model = AutoModelForCausalLM.from_pretrained(directory)
    known, said = model.model.embed_tokens.weight, model.lm_head.weight
    own = slice(1, len(tokens))  # a number of the embedding for each token, which no layer changes
    with torch.no_grad():
        known[:, own] = said[:, own] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[own] = layer.mlp.down_proj.weight[own] = 0
        for i, (token, next_token) in enumerate(itertools.pairwise(tokens), 1):
            known[token, i], said[next_token, i] = KNOWN, 3 * LIKELIER
    model.save_pretrained(directory)
    return directory
