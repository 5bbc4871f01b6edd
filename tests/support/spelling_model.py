"""A tiny model with SmolLM2's vocabulary that spells: it says single characters, where nothing forbids them.

A real vLLM serves it in milliseconds a token; the tokens that it says are seldom those of the tokenised text.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_proxy.commands.demo.model import cache_directory, prepare_model

LETTERS = 'abcdefghijklmnopqrstuvwxyz{}":,'  # those of JSON too, or a model that must write JSON would write blanks
KNOWN = 6.0  # the first number of every embedding, which no layer changes
LIKELIER = 9.0


def save_spelling_model(directory: Path, seed: int = 0, letters: str = LETTERS) -> Path:
    """Two layers, random weights but for the choice of characters."""
    smollm = prepare_model(cache_directory())
    tokens: dict[str, int] = Tokenizer.from_file(str(smollm / "tokenizer.json")).get_vocab()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=tokens["<|im_start|>"], eos_token_id=tokens["<|im_end|>"],
        pad_token_id=tokens["<|im_end|>"],
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = KNOWN
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = -LIKELIER
        model.lm_head.weight[[tokens[letter] for letter in letters], 0] = LIKELIER
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm / name, directory / name)
    return directory
