"""Decides which requests are sampled in a way that the trainer cannot compute again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .tools import dicts

Json = dict[str, Any]

# vLLM takes any lower temperature for 0. A top_p below it leaves one token, as do top_k 1 and min_p 1.
_GREEDY_BELOW = 1e-5
# The types of content parts that are no text, in all of the recorded APIs and in vLLM's own.
_MEDIA = (
    "image_url", "input_image", "image", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds",
    "video_url", "video", "video_embeds", "document", "file", "input_file", "computer_screenshot",
)  # fmt: skip

# Why a call cannot be trained on by reinforcement learning, though it can be learned from by imitation.
GREEDY = "greedy decoding is no sample of the policy"
NOT_FOLLOWED = "the trainer cannot follow how it was sampled: "

MEDIA = "the prompt has images, sound or files, which the trainer is not fed"


def is_greedy(request: Json) -> bool:
    """Return whether nothing is sampled, also by vLLM's own `use_beam_search` (of one beam, since n is 1)."""
    cold = any(_below(request.get(name), _GREEDY_BELOW) for name in ("temperature", "top_p"))
    sure = request.get("top_k") == 1 or request.get("min_p") == 1
    return cold or sure or bool(request.get("use_beam_search"))


def not_followed(request: Json) -> str | None:
    """Return why the trainer cannot compute the distribution of the answer again, or None if it can.

    What is a function of the tokens is not among the reasons: `trainer/step/shaping.py` computes it.
    """
    if _shows_media(request):
        return MEDIA
    if name := next(_beyond(request), None):
        return f"{NOT_FOLLOWED}{name}; leave it out of the request"
    return None


def constraint(request: Json) -> str | None:
    """Return the parameter that may make vLLM use a grammar, or None if there is none."""
    text, output = request.get("text"), request.get("output_config")
    for name, shape in (
        ("response_format", request.get("response_format")),
        ("text.format", text.get("format") if isinstance(text, dict) else None),
        ("output_config.format", output.get("format") if isinstance(output, dict) else None),
        ("output_format", request.get("output_format")),
        ("structured_outputs", request.get("structured_outputs")),
    ):
        if shape is not None and not (isinstance(shape, dict) and shape.get("type") == "text"):
            return name
    return next((name for name in request if name.startswith("guided_")), None) or _tool_constraint(request)


def _tool_constraint(request: Json) -> str | None:
    tools, choice = dicts(request.get("tools")), request.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not tools or kind == "none":
        return None
    if kind not in (None, "auto") or (isinstance(choice, dict) and choice.get("disable_parallel_tool_use")):
        return "tool_choice"
    if any(tool.get("strict") or any(f.get("strict") for f in dicts([tool.get("function")])) for tool in tools):
        return "tools' strict"
    return "parallel_tool_calls" if request.get("parallel_tool_calls") is False else None


def can_be_imitated(reason: str | None) -> bool:
    """Return whether an answer that was left out for `reason` is still complete, with its tokens."""
    return reason == GREEDY or (reason is not None and reason.startswith(NOT_FOLLOWED))


def is_not_followed(reason: str | None) -> bool:
    """Return whether an answer was left out because of how it was sampled, or of images and files in its prompt."""
    return reason == MEDIA or (reason is not None and reason.startswith(NOT_FOLLOWED))


def _beyond(request: Json) -> Iterator[str]:
    """The reasons of parameters by which something else than the policy chooses tokens."""
    thinking = request.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else request.get("thinking_token_budget")
    if budget is not None:
        yield "a thinking budget forces the end of thinking"
    if request.get("watermarking"):
        yield "watermarking chooses tokens by a secret"
    if request.get("vllm_xargs"):
        yield "vllm_xargs may be a plug-in's own sampling"


def _shows_media(request: Json) -> bool:
    """One quick look: a request may have a hundred thousand messages."""
    for name in ("messages", "input"):
        messages = request.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                content = message.get("content") or message.get("output")
                if type(content) is list and _has_media(content):
                    return True
    return False


def _has_media(parts: list[Any]) -> bool:
    for part in parts:
        if isinstance(part, dict):
            if part.get("type") in _MEDIA:
                return True
            # Anthropic's results of tools have parts of their own.
            inner = part.get("content")
            if type(inner) is list and any(isinstance(p, dict) and p.get("type") in _MEDIA for p in inner):
                return True
    return False


def _below(value: Any, limit: float) -> bool:
    return isinstance(value, int | float) and value < limit
