"""Models for tests, the sizes of known ones, and a chat template. torch is imported when a model is made."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 24


def save_llama(directory: Path, vocabulary: int, seed: int = 0, **shape: Any) -> Path:
    """A Llama with random weights. Its words are w0, w1, …"""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = LlamaConfig(vocab_size=vocabulary, initializer_range=0.2, **special, **shape)
    LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w1")
    tokenizer.save_pretrained(directory)
    return directory


def save_small_model(directory: Path, seed: int = 0) -> Path:
    """One layer, small enough to train in milliseconds."""
    return save_llama(
        directory, VOCABULARY, seed, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip


def random_rows(seed: int, count: int, first: int = 12, most: int = 8, vocabulary: int = 50) -> list[list[int]]:
    """Rows that branch off each other at random places, with duplicates and prefixes of each other among them."""
    rng = random.Random(seed)
    rows = [[rng.randrange(vocabulary) for _ in range(first)]]
    while len(rows) < count:
        kept = rng.choice(rows)
        added = [rng.randrange(vocabulary) for _ in range(rng.randrange(most))]
        rows.append(kept[: rng.randrange(1, len(kept) + 1)] + added)
    return [*rows, rows[0], [7, 7, 7]]


LETTERS = 'abcdefghijklmnopqrstuvwxyz{}":,'  # JSON's too, or a model that must write JSON would write blanks
KNOWN = 6.0  # the first number of every embedding, which no layer changes
LIKELIER = 9.0


def save_spelling_model(directory: Path, seed: int = 0, letters: str = LETTERS) -> Path:
    """A model with SmolLM2's vocabulary that says single characters, where nothing forbids them.

    Two layers, random weights but for the choice of characters. A real vLLM serves it in milliseconds a token; the
    tokens that it says are seldom the tokens of its text.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_proxy.commands.demo.model import cache_directory, prepare_model

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


# Tokens of SmolLM2's that nothing uses here, and what they are instead.
RENAMED = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}


def save_thinking_model(directory: Path) -> Path:
    """The spelling model with tokens that begin and end a thought, for vLLM's parsers of reasoning."""
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
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

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


def _sizes(
    kind: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool, **more: int
) -> dict[str, Any]:
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "tie_word_embeddings": tied,
        "vocab_size": 151936, **more,
    }  # fmt: skip


_OF_2_5 = {"max_position_embeddings": 32768}
_OF_3 = {"head_dim": 128, "max_position_embeddings": 40960}

SIZES: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B": _sizes("qwen2", 28, 1536, 12, 2, 8960, tied=True, **_OF_2_5),
    "Qwen3-4B": _sizes("qwen3", 36, 2560, 32, 8, 9728, tied=True, **_OF_3),
    "Qwen2.5-7B": _sizes("qwen2", 28, 3584, 28, 4, 18944, tied=False, **_OF_2_5, **{"vocab_size": 152064}),
    "Qwen3-8B": _sizes("qwen3", 36, 4096, 32, 8, 12288, tied=False, **_OF_3),
    "Qwen3-32B": _sizes("qwen3", 64, 5120, 64, 8, 25600, tied=False, **_OF_3),
}


# For SmolLM2, with tools, which its own template does not know; for vLLM's hermes parser.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{{- '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
