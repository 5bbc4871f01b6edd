"""Keeps an answered call as tokens, and builds the exact prompt of a call that continues it. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ...core.records import Choice
from ...core.tools import answers, dicts
from ...core.values import as_read
from ...store.requests import common_prefix
from .atoms import Atom, item_atoms, same_arguments

Json = dict[str, Any]

# What a request may change from turn to turn without another prompt for the same messages.
_SAMPLING = """
    messages model n seed stop stop_token_ids temperature top_p top_k min_p max_tokens max_completion_tokens min_tokens
    presence_penalty frequency_penalty repetition_penalty logit_bias logprobs top_logprobs stream stream_options
    return_token_ids response_format structured_outputs parallel_tool_calls tool_choice user metadata store service_tier
    safety_identifier prompt_cache_key request_id session_id priority ignore_eos bad_words allowed_token_ids
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens return_tokens_as_token_ids cache_salt
    vllm_xargs
"""
_UNSUPPORTED = """
    kv_transfer_params ec_transfer_params echo continue_final_message truncate_prompt_tokens prompt_logprobs
    use_beam_search return_prompt_text chat_template
"""


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """An answered call, as messages and as tokens.

    `ids`: its prompt and answer. The answer is the last `sampled` ids, including the end of turn if that was sampled.
    `rendered`: its messages with the generation prompt, as vLLM renders them; equals the prompt, unless the proxy built
    the prompt from tokens. `shape`: the parts of its request that a template reads besides the messages.
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
    def size(self) -> int:
        """Return the approximate size in bytes: the tokens, and three times as much for the messages."""
        return 16 * len(self.ids) + 4 * len(self.rendered)


def turn_of(
    request: Json, response: Any, prompt: Sequence[int], choices: Sequence[Choice], rendered: Sequence[int] = ()
) -> TokenTurn | None:
    """Return a call's turn; None unless its messages are text, it has one answer, and all tokens are known."""
    messages, answered = request.get("messages"), answers(response)
    if not (prompt and len(answered) == len(choices) == 1 and choices[0].token_ids and _are_texts(messages)):
        return None
    sampled, shown = choices[0].token_ids, array("i", rendered or prompt)
    ids = array("i", [*prompt, *sampled])
    return TokenTurn(messages, shape(request), answered[0][0], ids, len(sampled), choices[0].finish_reason, shown)


def shape(request: Json) -> Json:
    """Return the parts of a request, besides the messages, that a template may read."""
    sampling = {*_SAMPLING.split()}
    read = {name: value for name, value in request.items() if name not in sampling and value is not None}
    # An option of vLLM leaves the tools out of such a prompt.
    return read | ({"tool_choice": "none"} if request.get("tool_choice") == "none" else {})


def is_supported(request: Json) -> bool:
    """Return whether vLLM accepts a token prompt for this request, and gives only one answer."""
    request = as_read(request)
    is_plain = request.get("n") in (None, 1) and request.get("add_generation_prompt") is not False
    return is_plain and not any(map(request.get, _UNSUPPORTED.split())) and _are_texts(request.get("messages"))


def _are_texts(messages: Any) -> TypeGuard[list[Any]]:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and all(part.get("type") == "text" for part in dicts(message.get("content")))
        for message in messages
    )


def continued(known: Sequence[TokenTurn], messages: list[Any]) -> TokenTurn | None:
    """Return the longest known turn that the messages continue; of equally long ones, the last in `known`."""
    same = [turn for turn in known if _continues(messages, turn)]
    return max(reversed(same), key=lambda turn: len(turn.messages), default=None)


def _continues(messages: list[Any], turn: TokenTurn) -> bool:
    old = len(turn.messages)
    if len(messages) <= old + 1:  # if nothing follows the answer, the model is to continue it
        return False
    if messages[:old] != turn.messages and [*map(_atoms, messages[:old])] != [*map(_atoms, turn.messages)]:
        return False
    said, sent = (one.get("reasoning") or one.get("reasoning_content") for one in (turn.answer, messages[old]))
    return _atoms(messages[old]) == _atoms(turn.answer) and sent in (None, said)  # clients drop reasoning


def _atoms(message: Json) -> list[Atom]:
    """The parts of a message that stay the same however a client sends it: some clients renumber tool calls."""
    return [
        atom._replace(who="", what=same_arguments(atom.what)) if atom.kind == "call" else atom
        for atom in item_atoms(message)
    ]


def closing(one: list[int], other: list[int]) -> list[int]:
    """Return the tokens that a template adds after an answer: the common end of renderings with different answers."""
    return one[len(one) - common_prefix(one[::-1], other[::-1]) :]


def as_sampled(turn: TokenTurn, closing: list[int]) -> list[int]:
    """Return the rendering of the turn with its answer, assuming that the answer renders to the sampled tokens."""
    answer = turn.sampled_ids
    return [*turn.rendered, *answer[: len(answer) - _sampled_with(turn, closing)], *closing]


def exact_prompt(turn: TokenTurn, history: list[int], rendered: list[int], closing: list[int]) -> list[int] | None:
    """Return the tokens to send; None unless `rendered` begins with `history`, and `history` ends with `closing`.

    `history`: the turn's messages and answer, rendered; `rendered`: the new request's, with the generation prompt.
    """
    end = len(history) - len(closing)
    if rendered[: len(history)] != history or history[end:] != closing:
        return None
    follows = rendered[end:]
    return [*turn.ids, *follows[_sampled_with(turn, follows[: max(len(closing), 1)]) :]]


def _sampled_with(turn: TokenTurn, follows: list[int]) -> int:
    """How many of the tokens that follow an answer were sampled with it, as its end of turn; 0 if it was cut off."""
    answer = [] if turn.finish_reason == "length" else turn.sampled_ids
    return next((n for n in range(min(len(answer), len(follows)), 0, -1) if answer[-n:] == follows[:n]), 0)
