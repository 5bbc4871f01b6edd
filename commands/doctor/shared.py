"""Checks that the policy's servers see the directory that the trainer writes new weights to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from .checks import Check, failed, ok, warning

NAME = "shared directory"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER = "lightning-doctor"
# An adapter without weights: vLLM reads this file, then says that the tensors are missing.
ABOUT = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "bias": "none"}
NO_TENSORS, NOT_FOUND = "contain tensors", "No adapter found"

# Method, path and body to status and answer.
Send = Callable[[str, str, Any], Awaitable[tuple[int, Any]]]


async def check_shared(directory: Path, where: str, send: Send) -> Check:
    """Have the server at `where` look for an adapter in `directory`. Nothing is loaded."""
    fix = "share policy.directory with the server, under the same path (docs/running.md)"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="doctor-", dir=directory.absolute())
    except OSError as error:
        return failed(NAME, f"{directory} cannot be written: {error.strerror}", "correct policy.directory")
    with made as path:
        Path(path, "adapter_config.json").write_text(json.dumps(ABOUT))
        status, answer = await send("POST", LOAD, {"lora_name": ADAPTER, "lora_path": path})
        if status < 400:
            await send("POST", UNLOAD, {"lora_name": ADAPTER})
    if status < 400 or NO_TENSORS in str(answer):
        return ok(NAME, f"{where} reads adapters from {directory}")
    if status == 404 or NOT_FOUND in str(answer):
        return failed(NAME, f"{where} does not see {directory.absolute()}: it can get no new weights", fix)
    return warning(NAME, f"{where} cannot say whether it sees {directory}: HTTP {status} {str(answer)[:200]}", fix)
