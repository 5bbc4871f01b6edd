"""Extends vLLM's workers so that they can load weights with a head that is tied to the embeddings."""

from __future__ import annotations

from typing import Any

WORKER = f"{__name__}.TiedHeads"  # as vLLM's option --worker-extension-cls names it
RELOAD = "reload_with_tied_heads"


class TiedHeads:
    """Methods that vLLM adds to its workers."""

    reload_weights: Any
    model_runner: Any

    def reload_with_tied_heads(self, weights_path: str) -> None:
        """Load weights like `reload_weights`, and refresh packed tied heads, which `reload_weights` skips on a CPU."""
        self.reload_weights(weights_path=weights_path)
        users: dict[int, list[Any]] = {}
        for module in self.model_runner.get_model().modules():
            weight, method = getattr(module, "weight", None), getattr(module, "quant_method", None)
            if weight is not None and hasattr(method, "process_weights_after_loading"):
                users.setdefault(id(weight), []).append(module)
        for modules in users.values():
            for module in modules if len(modules) > 1 else ():
                module.quant_method.process_weights_after_loading(module)
