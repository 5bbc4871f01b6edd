"""Trains the model behind any agent: a proxy that records its calls, and a trainer that learns from their rewards."""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # imported only when needed: it takes milliseconds

    return version("lightning-proxy")
