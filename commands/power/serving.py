"""Serves power sampling for the time of an evaluation, where the configuration has an upstream for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

from ...proxy.config.root import Config
from ...proxy.errors import ConfigError
from ...proxy.policy.routing import models_by_upstream
from .chat import power_of
from .server import power_server

HERE = ("127.0.0.1", "localhost", "::1")


def check_power(config: Config, models: Iterable[str]) -> None:
    """Raise ConfigError if one of the models samples from a power and no upstream has it."""
    has_vllm = any(upstream.kind == "vllm" for upstream in config.upstreams)
    for name in models:
        if power_of(name) is not None and not (has_vllm and name in models_by_upstream(config.upstreams)):
            raise ConfigError(
                f"{name} needs an upstream of its own beside vLLM, which eval then serves: {{name: power, kind: "
                f'openai, base_url: "http://127.0.0.1:8101/v1", models: ["{name}"]}}'
            )


@asynccontextmanager
async def serving_power(config: Config, models: Iterable[str]) -> AsyncIterator[None]:
    """Answer for the `power:…` among the models at their upstreams' addresses until the block is left.

    An upstream on another machine is left to whoever serves it there.
    """
    by_model, vllm = models_by_upstream(config.upstreams), config.policy_upstream
    upstreams = {by_model[name].name: by_model[name] for name in models if power_of(name) is not None}
    async with AsyncExitStack() as stack:
        for upstream in upstreams.values():
            if vllm is not None and urlsplit(upstream.urls[0]).hostname in HERE:
                await stack.enter_async_context(power_server(upstream, vllm, config.policy.directory))
        yield
