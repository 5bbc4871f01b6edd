"""Imports litellm, which the extra `providers` installs, for whoever asks a provider's model."""

from __future__ import annotations

import importlib.util
import logging
import os
from types import ModuleType

from .errors import ConfigError

_SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or importing it fetches a price list
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",  # or it reads a .env file
    "MAX_IMAGE_URL_DOWNLOAD_SIZE_MB": "0",  # a URL that an agent names is not called
}


def require_litellm(what: str) -> None:
    """Raise ConfigError if litellm is not installed. `what` needs it."""
    if importlib.util.find_spec("litellm") is None:
        raise ConfigError(f"{what} needs litellm: pip install 'lightning-proxy[providers]'")


def import_litellm() -> ModuleType:
    """Import litellm and turn off its logs and reports, which may hold keys and entire conversations."""
    os.environ.update(_SETTINGS)
    import litellm

    litellm.suppress_debug_info = True
    litellm.turn_off_message_logging = True
    litellm.telemetry = False
    litellm.callbacks, litellm.success_callback, litellm.failure_callback = [], [], []
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).disabled = True
    return litellm
