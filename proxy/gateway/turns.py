"""Finds the earlier call that a chat request continues, and builds a prompt with that call's exact tokens. Pure.

Text does not show its sampled tokens: rendered and tokenised again, an answer may become other tokens.
So the next prompt is the earlier call's tokens as they were, and after them only what is new:

    earlier prompt · earlier answer, as sampled · what the template puts after an answer · new messages, rendered
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ...core.records import Choice
from ...core.tools import dicts
from ...core.values import as_read
from ...store.requests import common_prefix

Json = dict[str, Any]

# first: there is no earlier call to continue. All that follow are sent as text, because
# edited: the history is not the earlier messages and answers;
# changed: its tools, or other things that a template reads, are new;
# template: it renders earlier turns differently later, or its text after an answer is not clear;
# unsupported: vLLM takes no tokens with such a request;
# refused: vLLM answered an error; ignored: it took other tokens; unavailable: it has no render route.
Outcome = Literal["exact", "first", "edited", "changed", "template", "unsupported", "refused", "ignored", "unavailable"]

# What a request may change from turn to turn without another prompt for the same messages.
# fmt: off
_SAMPLING = frozenset({
    "messages", "model", "n", "seed", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "max_tokens",
    "max_completion_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "logprobs", "top_logprobs", "stream", "stream_options", "return_token_ids", "response_format", "structured_outputs",
    "parallel_tool_calls", "tool_choice", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "request_id", "session_id", "priority", "ignore_eos", "bad_words",
    "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "return_tokens_as_token_ids", "cache_salt", "vllm_xargs",
})
_UNSUPPORTED = frozenset({
    "kv_transfer_params", "ec_transfer_params", "echo", "continue_final_message", "truncate_prompt_tokens",
    "prompt_logprobs", "use_beam_search", "return_prompt_text", "chat_template",
})
# fmt: on


class AsText(Exception):
    """Signals that the call goes as text; `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """An answered call, as messages and as tokens.

    `ids`: its prompt, then its answer, which is the last `sampled` of them, with the end of turn if that was sampled.
    `rendered`: its messages with the generation prompt, as vLLM renders them: the prompt, unless that was made here.
    `shape`: what of its request a template reads besides the messages.
    """

    messages: list[Any]
    shape: Json
    answer: Json
    ids: array[int]
    sampled: int
    finish_reason: str | None
    rendered: array[int]

    @property
    def sampled_ids(self) -> list[int]:
        return self.ids[len(self.ids) - self.sampled :].tolist()

    @property
    def ends_by_itself(self) -> bool:
        """Return whether the turn's answer may end in the end-of-turn token."""
        return self.finish_reason != "length"


def turns(
    request: Json, response: Any, prompt: Sequence[int], choices: Sequence[Choice], rendered: Sequence[int] = ()
) -> Iterator[TokenTurn]:
    """Return one turn per answer of a call with known tokens. `rendered`: as in TokenTurn, or empty."""
    messages = request.get("messages")
    by_index = {choice.index: choice for choice in choices}
    for answered in dicts(response.get("choices")) if isinstance(response, dict) else ():
        choice, message = by_index.get(answered.get("index", 0)), answered.get("message")
        if prompt and choice and choice.token_ids and isinstance(message, dict) and isinstance(messages, list):
            ids = array("i", [*prompt, *choice.token_ids])
            shown = array("i", rendered or prompt)
            yield TokenTurn(messages, shape(request), message, ids, len(choice.token_ids), choice.finish_reason, shown)


def shape(request: Json) -> Json:
    """Return the parts of a request, besides the messages, that a template may read."""
    read = {name: value for name, value in request.items() if name not in _SAMPLING and value is not None}
    # An option of vLLM leaves the tools out of such a prompt.
    return read | ({"tool_choice": "none"} if request.get("tool_choice") == "none" else {})


def is_supported(request: Json) -> bool:
    """Return whether vLLM takes token prompts for this request and gives one answer to continue."""
    request = as_read(request)
    messages = request.get("messages")
    if not isinstance(messages, list) or any(request.get(name) for name in _UNSUPPORTED):
        return False
    if request.get("n") not in (None, 1) or request.get("add_generation_prompt") is False:
        return False
    return all(isinstance(message, dict) and _is_text(message.get("content")) for message in messages)


def has_answers(request: Json) -> bool:
    """Return whether the history has an answer of a model."""
    return any(message.get("role") == "assistant" for message in dicts(request.get("messages")))


def earlier_turn(known: Sequence[TokenTurn], request: Json) -> TokenTurn:
    """Return the longest of the known turns (newest last) that a supported request continues, or raise AsText."""
    continued = [turn for turn in known if _continues(request["messages"], turn)]
    if not continued:
        raise AsText("edited" if known and has_answers(request) else "first")
    turn = max(reversed(continued), key=lambda turn: len(turn.messages))
    if turn.shape != shape(request):
        raise AsText("changed")
    return turn


def is_last(known: Sequence[TokenTurn], request: Json) -> bool:
    """Return whether the request's last answer is that of one of the turns, or there is none in it."""
    messages = request["messages"]
    answered = [
        i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "assistant"
    ]
    return not answered or any(len(turn.messages) == answered[-1] and _continues(messages, turn) for turn in known)


def closing(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the tokens that a template puts after an answer: the common end of renderings with different answers."""
    return [*one][len(one) - common_prefix(one[::-1], other[::-1]) :]


def undrifted_prompt(turn: TokenTurn, rendered: Sequence[int], closing: Sequence[int]) -> list[int] | None:
    """Return the tokens to send when the answer is rendered as the same tokens that were sampled.

    `rendered`: the request's messages with the generation prompt. None where they differ.
    """
    answer = turn.sampled_ids
    old = [*turn.rendered, *answer]
    ends = [*closing[_overlap(answer, closing) if turn.ends_by_itself else 0 :]]
    if [*rendered[: len(old) + len(ends)]] != old + ends:
        return None
    return [*turn.ids, *rendered[len(old) :]]


def exact_prompt(turn: TokenTurn, history: Sequence[int], rendered: Sequence[int], closing: Sequence[int]) -> list[int]:
    """Return the tokens to send. Raise AsText if the template mixes the new part with the old one.

    `history`: the turn's messages and its answer, rendered; `rendered`: the request's with the generation prompt.
    """
    end = len(history) - len(closing)
    if [*rendered[: len(history)]] != [*history] or [*history[end:]] != [*closing]:
        raise AsText("template")
    follows = [*rendered[end:]]
    if turn.ends_by_itself:
        follows = follows[_overlap(turn.sampled_ids, follows[: max(len(closing), 1)]) :]
    return [*turn.ids, *follows]


def _overlap(answer: Sequence[int], follows: Sequence[int]) -> int:
    """The number of following tokens that the answer already ends in: its end of turn, if that was sampled."""
    longest = min(len(answer), len(follows))
    return next((n for n in range(longest, 0, -1) if [*answer[-n:]] == [*follows[:n]]), 0)


def _continues(messages: list[Any], turn: TokenTurn) -> bool:
    old = len(turn.messages)
    if len(messages) <= old + 1:  # with nothing after the answer the model is to write on itself
        return False
    same = messages[:old] == turn.messages or all(map(_same, messages, turn.messages))
    return same and _is_answer(messages[old], turn.answer)


def _same(one: Any, other: Any) -> bool:
    return bool(_without_empty(one) == _without_empty(other))


def _is_answer(sent: Any, answer: Json) -> bool:
    """Whether a message is the answer as the agent got it; clients drop reasoning, and count tool calls anew."""
    sent, answer = _without_empty(sent), _without_empty(answer)
    if "reasoning" not in sent:
        answer.pop("reasoning", None)
    for message in (sent, answer):
        message["content"] = _text(message.get("content"))
        message["tool_calls"] = [_called(call) for call in dicts(message.get("tool_calls"))]
    return bool(sent == answer)


def _without_empty(message: Any) -> Json:
    """A message without empty fields, which clients may drop when they send it again."""
    if not isinstance(message, dict):
        return {}
    kept = {name: value for name, value in message.items() if value not in (None, "", [])}
    if "reasoning_content" in kept:
        kept["reasoning"] = kept.pop("reasoning_content")
    return kept


def _called(call: Json) -> tuple[Any, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    try:
        return function.get("name"), orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return function.get("name"), arguments


def _text(content: Any) -> Any:
    """The texts of parts, joined; other content unchanged."""
    if isinstance(content, list) and all(isinstance(part.get("text"), str) for part in dicts(content)):
        return "".join(part["text"] for part in dicts(content))
    return content or ""


def _is_text(content: Any) -> bool:
    return not isinstance(content, list) or all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content
    )
