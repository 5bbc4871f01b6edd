"""Serves power sampling for the time of an evaluation, where the configuration has an upstream for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from urllib.parse import urlsplit

from ...proxy.config.root import Config
from ...proxy.errors import ConfigError
from ...proxy.policy.routing import models_by_upstream
from ...proxy.power.chat import power_of
from ...proxy.power.server import power_server

HERE = ("127.0.0.1", "localhost", "::1")


def serving_power(config: Config, models: Iterable[str]) -> AbstractAsyncContextManager[None]:
    """Answer for the `power:…` among the models at their upstream's address; ConfigError if there is no such upstream.

    An upstream on another machine is left to whoever serves it there.
    """
    wanted = [name for name in models if power_of(name) is not None]
    if not wanted:
        return nullcontext()
    upstream = models_by_upstream(config.upstreams).get(wanted[0])
    vllm = next((other for other in config.upstreams if other.kind == "vllm"), None)
    if upstream is None or vllm is None:
        raise ConfigError(
            f"{wanted[0]} needs an upstream of its own beside vLLM, which eval then serves: {{name: power, kind: "
            f'openai, base_url: "http://127.0.0.1:8101/v1", models: ["{wanted[0]}"]}}'
        )
    return power_server(upstream, vllm) if urlsplit(upstream.urls[0]).hostname in HERE else nullcontext()
