"""The section `prompts`."""

from __future__ import annotations

from ..config.core import CoreConfig
from ..gate.config import Gated


class PromptKeys(CoreConfig):
    prompts: Gated = Gated()
