"""Reads tokens and usage from answers and chunks, and decides whether calls can be trained on or imitated."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from .records import CallStatus, Choice
from .tools import conversation, dicts
from .values import as_read, number

Json = dict[str, Any]

# What vLLM sends for a log-probability of minus infinity, which JSON does not have.
_MINUS_INFINITY = -9999.0
# Finish reasons of answers that were sampled to their end, or to the agent's limit.
_COMPLETE = frozenset({"stop", "length", "tool_calls", "function_call"})

NO_TOKEN_IDS = "no token ids from the upstream"
NOT_THE_POLICY = "the model is not the policy"
ONLY_RECORDED = "the agent sent X-Recording: only"
# vLLM takes any lower temperature for 0. A top_p below it leaves one token, as do top_k 1 and min_p 1.
_GREEDY_BELOW = 1e-5
# The types of content parts that are not text, in all of the recorded APIs and in vLLM's own.
_MEDIA = (
    "image_url", "input_image", "image", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds",
    "video_url", "video", "video_embeds", "document", "file", "input_file", "computer_screenshot",
)  # fmt: skip

# Why a call cannot be trained on by reinforcement learning. For the first two, it can be learned from by imitation.
GREEDY = "greedy decoding is no sample of the policy"
NOT_FOLLOWED = "the trainer cannot follow how it was sampled: "
MEDIA = "the prompt has images, sound or files"


@dataclass(slots=True)
class _ChoiceTokens:
    """The tokens of one choice, as received. They are checked once, at the end."""

    ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    has_ids: bool = False

    def add(self, choice: Json) -> None:
        if isinstance(ids := choice.get("token_ids"), list):
            self.has_ids = True
            self.ids += ids
        if (logprobs := choice.get("logprobs")) is not None:
            self.logprobs += _logprobs(logprobs)
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason or self.finish_reason

    def freeze(self, index: int) -> Choice:
        ids = tuple(self.ids) if _are_ids(self.ids) else ()
        return Choice(index, ids, tuple(self.logprobs) if _are_finite(self.logprobs) else (), self.finish_reason)


class Tokens:
    """Collects the tokens of an answer, which is added whole or as the chunks of a stream."""

    def __init__(self, body: Json | None = None) -> None:
        self.prompt_token_ids: tuple[int, ...] = ()
        self.usage: Json | None = None
        self._choices = defaultdict[int, _ChoiceTokens](_ChoiceTokens)
        if body is not None:
            self.add(body)

    def add(self, body: Json) -> None:
        if isinstance(usage := body.get("usage"), dict):
            self.usage = usage or self.usage
        if "prompt_token_ids" in body:
            self._add_prompt(body)
        choices = body.get("choices")
        for place, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                if "prompt_token_ids" in choice:
                    self._add_prompt(choice)
                index = number(choice.get("index"))
                self._choices[place if index is None else index].add(choice)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(self._choices[index].freeze(index) for index in sorted(self._choices))

    def untrainable_reason(self, status: CallStatus, request: Json) -> str | None:
        """Return why the call cannot be trained on, or None if it can."""
        if status != "ok":
            return f"the call ended as {status}"
        request = as_read(request)
        if len(self._choices) > 1 or request.get("n") not in (None, 1):
            return "n > 1: which answer the agent used is not known"
        choice = self._choices.get(0)
        if choice is None or not choice.has_ids or not _are_ids(choice.ids) or not self.prompt_token_ids:
            return NO_TOKEN_IDS
        if not choice.ids:
            return "the answer is empty"
        if choice.finish_reason not in _COMPLETE:
            return f"the answer may be cut: its finish reason is {choice.finish_reason}"
        if not _are_finite(choice.logprobs):
            return "a log-probability is not a finite number of at most 0"
        if len(choice.ids) != len(choice.logprobs):
            return f"{len(choice.ids)} token ids but {len(choice.logprobs)} log-probabilities"
        if self.usage is None:
            return "no usage from the upstream to check the token count with"
        for what, ids, count in (
            ("completion", choice.ids, self.usage.get("completion_tokens", self.usage.get("output_tokens"))),
            ("prompt", self.prompt_token_ids, self.usage.get("prompt_tokens", self.usage.get("input_tokens"))),
        ):
            if len(ids) != count:
                return f"{len(ids)} {what} token ids but usage says {count}"
        return GREEDY if is_greedy(request) else not_followed(request)

    def _add_prompt(self, part: Json) -> None:
        ids = part["prompt_token_ids"]
        if not self.prompt_token_ids and isinstance(ids, list) and _are_ids(ids):
            self.prompt_token_ids = tuple(ids)


def _are_ids(values: list[Any]) -> bool:
    """Whether all are valid token ids: non-negative 32-bit integers."""
    try:
        return len(array("i", values)) == 0 or min(values) >= 0
    except (TypeError, OverflowError):
        return False


def _logprobs(value: Any) -> list[Any]:
    """The log-probabilities of a choice: `token_logprobs` in /v1/completions, `content[].logprob` in chat."""
    if not isinstance(value, dict):
        return []
    if isinstance(values := value.get("token_logprobs"), list):
        return values
    content = value.get("content")
    try:
        return [item["logprob"] for item in content or ()]
    except (TypeError, KeyError):
        return [None]


def _are_finite(logprobs: list[Any]) -> bool:
    """Whether all are at most 0 and greater than the number that stands for minus infinity."""
    try:
        return not logprobs or bool(min(logprobs) > _MINUS_INFINITY and max(logprobs) <= 0)
    except TypeError:
        return False


def is_greedy(request: Json) -> bool:
    """Return whether decoding is greedy. Beam search is greedy here: n is 1, so there is only one beam."""
    limits = request.get("temperature"), request.get("top_p")
    cold = any(isinstance(limit, int | float) and limit < _GREEDY_BELOW for limit in limits)
    sure = request.get("top_k") == 1 or request.get("min_p") == 1
    return cold or sure or bool(request.get("use_beam_search"))


def not_followed(request: Json) -> str | None:
    """Return why the trainer cannot recompute the distribution of the answer, or None if it can.

    Parameters whose effect depends only on the tokens are no obstacle: `trainer/step/shaping.py` recomputes the effect.
    """
    for message in conversation(request):  # there may be a hundred thousand: skip plain texts here
        content = (message.get("content") or message.get("output")) if isinstance(message, dict) else None
        if isinstance(content, list) and _has_media(content):
            return MEDIA
    thinking = request.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else request.get("thinking_token_budget")
    if budget is not None:
        chooser = "a thinking budget forces the end of thinking"
    elif request.get("watermarking"):
        chooser = "watermarking chooses tokens by a secret"
    elif request.get("vllm_xargs"):
        chooser = "vllm_xargs may be a plug-in's own sampling"
    else:
        return None
    return f"{NOT_FOLLOWED}{chooser}; leave it out of the request"


def constraint(request: Json) -> str | None:
    """Return the parameter that may make vLLM use a grammar, or None if there is none."""
    request = as_read(request)
    for path in ("response_format", "text.format", "output_config.format", "output_format", "structured_outputs"):
        shape: Any = request
        for name in path.split("."):
            shape = shape.get(name) if isinstance(shape, dict) else None
        if shape is not None and not (isinstance(shape, dict) and shape.get("type") == "text"):
            return path
    if guided := next((name for name in request if name.startswith("guided_")), None):
        return guided
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
    """Return whether an answer that cannot be trained on for this reason can still be imitated."""
    return (reason or "").startswith((GREEDY, NOT_FOLLOWED))


def is_not_followed(reason: str | None) -> bool:
    """Return whether an answer is not trained on because of how it was sampled or because its prompt has media."""
    return (reason or "").startswith((MEDIA, NOT_FOLLOWED))


def _has_media(parts: Any) -> bool:
    """Whether one of the parts has media, or one nested in them, as in Anthropic's tool results."""
    return any(part.get("type") in _MEDIA or _has_media(part.get("content")) for part in dicts(parts))
