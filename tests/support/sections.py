"""Sections of the configuration, with keys that features once had there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_proxy.core.config.policy import PolicyConfig as PolicyConfig
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.section import feature_sections
from lightning_proxy.core.config.trainer import TrainerConfig as CoreTrainerConfig


class TrainerConfig(CoreTrainerConfig):
    """The section `trainer`, made of its own keys and of what features once had there (`sft`, `teacher`, …)."""

    @classmethod
    def model_validate(cls, settings: Any, **_: Any) -> Any:
        return with_features(trainer=settings).trainer


def with_features(**sections: Any) -> Config:
    """A configuration of sections that may have keys of features."""
    return Config.model_validate(placed(**sections))


def placed(**sections: Any) -> dict[str, Any]:
    """Sections with keys of features, which go where they belong."""
    moved = {old: new for kind in feature_sections().values() for old, new in kind.moved.items()}
    data: dict[str, Any] = {}
    for old, keys in sections.items():
        section = moved.get(old, old)
        if not isinstance(keys, Mapping):
            data[section] = keys
            continue
        data.setdefault(section, {})
        for key, value in keys.items():
            *above, last = moved.get(f"{section}.{key}", f"{section}.{key}").split(".")
            inner = data
            for name in above:
                inner = inner.setdefault(name, {})
            if isinstance(value, Mapping) and isinstance(inner.get(last), dict):
                inner[last] |= value
            else:
                inner[last] = dict(value) if isinstance(value, Mapping) else value
    return data
