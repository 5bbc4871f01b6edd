"""The section `upstreams`: the model servers that calls go to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr

from .address import SECRET_NAME, secrets_in
from .section import Seconds, Section, check_key, check_url

SHORTEST_KEY = 12


def below(url: str, path: str = "") -> str:
    """Return a server's URL with `path` inserted before its query."""
    base, mark, query = url.partition("?")
    return base.rstrip("/") + path + mark + query


class UpstreamConfig(Section):
    name: str
    kind: Literal["vllm", "openai", "litellm"] = "vllm"
    base_url: str | None = None
    replicas: list[str] = []
    servers: list[str] = []
    session_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] | None = None
    api_key: SecretStr | None = None
    api_key_header: Literal["authorization", "x-api-key"] = "authorization"
    models: list[str] = []
    model_map: dict[str, str] = {}
    litellm_params: dict[str, Any] = {}
    fallbacks: list[str] = []
    trust_env: bool = False
    connect_timeout_s: Seconds = 5.0
    first_byte_timeout_s: Seconds = 600.0
    idle_timeout_s: Seconds = 300.0
    total_timeout_s: Seconds | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    retry_wait_s: Seconds = 30.0
    health_check_s: Seconds | None = None

    @cached_property
    def urls(self) -> tuple[str, ...]:
        """Return the URLs of its servers (`base_url` and `replicas`), without a slash at the end of the path."""
        return tuple(below(url) for url in (self.base_url, *self.replicas) if url is not None)

    @cached_property
    def published_to(self) -> tuple[str, ...]:
        """Return the URLs of servers that get new weights: those behind a router, or else the ones that get calls."""
        return tuple(map(below, self.servers)) or self.urls

    def server_name(self, url: str) -> str:
        """Return a name for one of its servers, without the server's address."""
        servers = [*dict.fromkeys((*self.urls, *self.published_to))]
        return self.name if len(servers) == 1 else f"{self.name}, server {servers.index(url) + 1} of {len(servers)}"

    @cached_property
    def credentials(self) -> dict[str, str]:
        """Return the header that carries the API key; {} if there is no key."""
        if self.api_key is None:
            return {}
        key, header = self.api_key.get_secret_value(), self.api_key_header
        return {header: f"Bearer {key}" if header == "authorization" else key}

    def secrets(self) -> list[str]:
        """Return its key, the secrets in its addresses, and values in `litellm_params` with secret-sounding names."""
        urls = (self.base_url or "", *self.replicas, *self.servers)
        in_urls = [secret for url in urls for secret in secrets_in(url)]
        return [*self.secret_keys(), *in_urls, *_secret_texts(self.litellm_params)]

    @cached_property
    def masked(self) -> tuple[str, ...]:
        """Return the secrets to mask in its answers, longest first. Short ones are left out, as they may be words."""
        return tuple(sorted({one for one in self.secrets() if len(one) >= SHORTEST_KEY}, key=len, reverse=True))

    def faults(self) -> Iterator[str]:
        check_key("api_key", self.api_key)
        is_litellm = self.kind == "litellm"
        own = [] if is_litellm and self.base_url is None else [self.base_url or ""]
        for key, urls in (("base_url", own), ("replicas", self.replicas), ("servers", self.servers)):
            for url in urls:
                check_url(key, url, is_vllm=self.kind == "vllm")
        if self.servers and (self.kind != "vllm" or self.replicas):
            yield "servers are vLLM servers behind a router at base_url: they need kind vllm, and no replicas"
        if len({*self.urls}) < len(self.urls):
            yield "replicas must differ from each other and from base_url"
        if len({*self.published_to}) < len(self.published_to):
            yield "servers must differ from each other"
        if is_litellm and not self.models and not self.model_map:
            yield "kind litellm serves only the names in models and model_map: add at least one"
        if is_litellm and (self.replicas or self.session_header):
            yield "replicas and session_header cannot be used with kind litellm"
        if self.health_check_s and not self.base_url:
            yield "health_check_s needs a base_url to check"
        if self.litellm_params and not is_litellm:
            yield "litellm_params is for kind litellm only"


def fallback_faults(upstreams: Sequence[UpstreamConfig]) -> Iterator[str]:
    """Yield problems: a name that is not unique, a fallback that does not exist, or fallbacks that form a cycle."""
    fallbacks = {upstream.name: upstream.fallbacks for upstream in upstreams}
    if len(fallbacks) < len(upstreams):
        yield "upstreams: two have the same name; each needs a name of its own"
    for name, following in fallbacks.items():
        if unknown := [other for other in following if other not in fallbacks]:
            yield f"upstreams: {name} falls back to {unknown[0]!r}, which is not the name of an upstream"
    try:
        TopologicalSorter(fallbacks).prepare()
    except CycleError as error:
        yield f"upstreams: fallbacks form a cycle: {' -> '.join(reversed(error.args[1]))}"


def _secret_texts(value: Any, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secret_texts(inner, is_secret or SECRET_NAME.search(str(name)) is not None)
    elif isinstance(value, list):
        for inner in value:
            yield from _secret_texts(inner, is_secret)
    elif is_secret and isinstance(value, str):
        yield from (value, value.rpartition(" ")[2])  # also without its scheme, as in "Bearer …"
