"""Requests and what upstreams answer them, as data: what an agent must see through the proxy as it sees it directly.

`FAMILIES`: cases by name. A case is a request's bytes and a script; most scripts do not look at the request, those of
vLLM's own dialects (`voice`) are shaped by it.
"""

from __future__ import annotations

from support.corpus import dialects, faults, http, routes, streams
from support.corpus.case import Case

FAMILIES: dict[str, list[Case]] = {
    "vLLM's dialects": [*dialects.dialects()],
    "other JSON": [*dialects.pretty()],
    "streams cut at every byte": [*streams.splits()],
    "answers cut at every byte on the wire": [*streams.tcp_splits()],
    "vLLM's streams in chunks of every size": [*streams.vllm_splits()],
    "what is in a stream": [*streams.events()],
    "nothing is held back": [*streams.in_time()],
    "statuses": [*http.statuses()],
    "headers": [*http.headers()],
    "compression": [*http.compressed()],
    "other routes": [*routes.requests(), *routes.answers()],
    "broken upstreams": [*faults.broken()],
    "broken off after every event": [*faults.broken_dialects()],
    "stalls": [*faults.stalls()],
}
