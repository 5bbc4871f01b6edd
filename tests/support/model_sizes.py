"""The sizes of known models, as their config.json has them."""

from __future__ import annotations

from typing import Any


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
