"""Adds the call fields of `config.py` to the API, with their types."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ...proxy.api.views import Call
from ...proxy.hooks import ProxyPlugin


class Context(BaseModel):
    edge: Literal["continues", "edits", "compacts", "delegates", "returns", "retries"]
    call_id: str


class CallContexts(BaseModel):
    """`contexts`: where the call's context comes from. `rejected`: another attempt was used instead of its answer."""

    contexts: list[Context]
    rejected: bool


class ContextsPlugin(ProxyPlugin):
    fields = ((Call, CallContexts),)


plugin = ContextsPlugin
