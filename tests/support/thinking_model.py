"""The spelling model with tokens that begin and end a thought, for vLLM's parsers of reasoning."""

from __future__ import annotations

import json
from pathlib import Path

from support.spelling_model import save_spelling_model

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
