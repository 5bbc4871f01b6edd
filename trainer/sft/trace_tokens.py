"""Gives recorded calls the tokens to learn from by imitation. No torch.

What the policy sampled keeps its exact tokens. An answer of another model has none of the policy's. The policy's chat
template shows its messages, once, and the answer's tokens are what it adds to the prompt.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ...proxy.apis.tokens import NO_TOKEN_IDS, NOT_THE_POLICY
from ...proxy.types import ModelCall
from ..tuning.rollouts import is_whole, with_tokens

Json = dict[str, Any]


def as_trace(call: ModelCall, tokenizer: PreTrainedTokenizerBase) -> ModelCall | None:
    """Return the call with tokens to imitate, at log-probability 0; unchanged if it is of no use.

    None if it has to be tokenised, and the chat template does not show its answer after the prompt.
    """
    if is_whole(call):
        return with_tokens(call, call.prompt_token_ids, call.response_token_ids)
    if call.untrainable_reason not in (NOT_THE_POLICY, NO_TOKEN_IDS) or not call.is_decision or len(call.choices) > 1:
        return call
    tokens = _tokenised(call, tokenizer) if call.endpoint == "chat/completions" else None
    return tokens and with_tokens(call, *tokens)


def _tokenised(call: ModelCall, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """The tokens of prompt and answer, tokenised apart, as the policy would see the one and sample the other."""
    try:
        (choice,), messages = call.response["choices"], [_message(m) for m in call.request["messages"]]
        prompt = _shown(tokenizer, call.request, messages, add_generation_prompt=True)
        whole = _shown(tokenizer, call.request, [*messages, _message(choice["message"])])
        cut = choice.get("finish_reason") == "length"
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError):  # whatever a template makes of messages
        return None
    if not whole.startswith(prompt):
        return None
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole[len(prompt) :])]
    return ids[0], _ended(ids[1], tokenizer.eos_token_id, cut=cut)


def _shown(tokenizer: PreTrainedTokenizerBase, request: Json, messages: list[Json], **options: Any) -> str:
    options |= request.get("chat_template_kwargs") or {}
    text: str = tokenizer.apply_chat_template(messages, tools=request.get("tools"), tokenize=False, **options)
    return text


def _message(message: Json) -> Json:
    """A message as vLLM hands it to a template: text in one piece, a tool call's arguments as an object."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    shown = {name: value for name, value in message.items() if value is not None} | {"content": content or ""}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [_tool_call(call) for call in calls]
    return shown


def _tool_call(call: Json) -> Json:
    function = call["function"]
    return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}


def _ended(ids: list[int], end: int | None, *, cut: bool) -> list[int]:
    """The answer up to and with the token that ends it; without that token if it was `cut` off."""
    if end is None:
        return ids
    last = len(ids) - 1 - ids[::-1].index(end) if end in ids else len(ids)
    return ids[:last] + ([] if cut else [end])
