"""Streams as other servers send them, each with what must be recorded of it."""

from __future__ import annotations

from support.cases import Case
from support.streams.content_types import TYPES
from support.streams.lenient import LENIENT
from support.streams.messages import OF_MESSAGES
from support.streams.responses import TERMINAL
from support.streams.tool_calls import TOOL_CALLS
from support.streams.values import ENDS, VALUES

OWN: list[Case] = [*TOOL_CALLS, *VALUES, *ENDS, *TERMINAL, *OF_MESSAGES, *TYPES, *LENIENT]
