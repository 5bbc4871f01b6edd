"""Shows recorded chats by the policy's chat template, as vLLM did before it sampled. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]

# Whatever a template or a recorded message may raise.
CANNOT_BE_SHOWN = (TemplateError, ValueError, TypeError, LookupError, AttributeError)


def shown(tokenizer: PreTrainedTokenizerBase, request: Json, messages: Sequence[Json], **options: Any) -> str:
    """Return `messages` in the template's text, with the tools and template arguments of `request`."""
    options |= request.get("chat_template_kwargs") or {}
    text: str = tokenizer.apply_chat_template([*messages], tools=request.get("tools"), tokenize=False, **options)
    return text


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that has its special tokens already."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def as_shown(message: Json) -> Json:
    """Return a message as vLLM hands it to a template: text in one piece, a tool call's arguments as an object."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    shown_message = {name: value for name, value in message.items() if value is not None} | {"content": content or ""}
    if calls := message.get("tool_calls"):
        shown_message["tool_calls"] = [_tool_call(call) for call in calls]
    return shown_message


def _tool_call(call: Json) -> Json:
    function = call["function"]
    return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}
