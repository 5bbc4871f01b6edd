"""Removes secrets, text that matches patterns, and chosen fields from records before they are stored. Pure.

What the agent and the model see is never changed. Ids (of rollouts, tasks, agents) are stored unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .config.server import RedactConfig
from .json_text import dumps
from .records import CallEnd, CallStart, Choice, Event
from .tools import tool_calls

MASK = "[redacted]"
REASON = "redacted"

# A configured key shorter than this might be any word.
_SHORTEST_KEY = 8
# Fields of a request that no model sees.
_NOT_SHOWN = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
# Fields of an answer that repeat its text.
_TOKENS = frozenset(
    {"token_ids", "prompt_token_ids", "logprobs", "prompt_logprobs", "input_messages", "output_messages"}
)


class SecretShape(NamedTuple):
    """A kind of secret. Its pattern begins with the literal `hint` and is matched in linear time.

    Python searches for a literal quickly, but tries a pattern that begins otherwise at every character. The user's own
    patterns have an empty hint, and may be slow.
    """

    hint: str
    pattern: re.Pattern[str]
    instead: str | Callable[[re.Match[str]], str] = MASK


def _token(hint: str, then: str, inside: str = "A-Za-z0-9") -> SecretShape:
    r"""The shape of a token, which must not follow a character of `inside`: "risk-…" has no token "sk-…".

    An escape may come before it: JSON in a string has "\nsk-…", a URL "%20sk-…".
    """
    begin = re.escape(hint)
    escapes = (r"\\[bfnrt]", r"\\u[0-9A-Fa-f]{4}", "%[0-9A-Fa-f]{2}")
    escaped = "|".join(f"(?<={escape}{begin})" for escape in escapes)
    pattern = re.compile(f"{begin}(?:(?<![{inside}]{begin})|{escaped}){then}")
    # Words joined by hyphens are not a key. A check here, not in the pattern, keeps the pattern linear.
    return SecretShape(hint, pattern, lambda found: MASK if re.search("[0-9A-Z]", found[0]) else found[0])


# A block that is cut off is still a key.
_KEY_BLOCK = (
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
    r"[^-]*+(?:-(?!----END )[^-]*+)*+(?:-----END [^-]*+-{0,5})?"
)
# "The bearer of responsibilities" is not a token.
_BEARER = r"\s++(?:(?=[A-Za-z._~+/-]{0,100}\d)[\w.~+/-]{16,}|[\w.~+/-]{32,})=*"
_AWS_SECRET = r"_?(?:access_?)?key[^\w/+]{1,8}))[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"

# What follows the beginnings of tokens: first our own keys, then OpenAI's and Anthropic's.
_AFTER = {
    "lpk-": r"[\w-]{20,}",
    "sk- glpat-": "[A-Za-z0-9_-]{20,}",
    "sk_live_ sk_test_ rk_live_ rk_test_": "[A-Za-z0-9]{16,}",
    "AKIA ASIA": "[A-Z0-9]{16}",
    "AIza": "[A-Za-z0-9_-]{35}",
    "ghp_ gho_ ghu_ ghs_ ghr_": "[A-Za-z0-9]{36,}",
    "github_pat_": "[A-Za-z0-9_]{22,}",
    "hf_": "[A-Za-z0-9]{30,}",
    "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xapp-": "[A-Za-z0-9-]{10,}",
    "hooks.slack.com/services/": "[A-Za-z0-9/_-]{20,}",
}
SHAPES = (
    *(_token(hint, then) for hints, then in _AFTER.items() for hint in hints.split()),
    # A JSON Web Token. Tried once per run of its characters, or the time would grow with the square of the length.
    _token("eyJ", r"[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){2,4}", inside="A-Za-z0-9_-"),
    SecretShape("-----BEGIN ", re.compile(_KEY_BLOCK)),
    *(SecretShape(hint, re.compile(f"({hint}(?i:{_AWS_SECRET}"), rf"\1{MASK}") for hint in ("ecret", "ECRET")),
    *(SecretShape(hint, re.compile(hint + _BEARER)) for hint in ("bearer", "Bearer", "BEARER")),
)


class Redactor:
    """Redacts copies, never the originals. `text` and `value` return the same object if nothing was redacted."""

    def __init__(self, config: RedactConfig, keys: Iterable[str] = ()) -> None:
        """`keys`: the configured keys. `config.secrets` redacts them too, except short ones."""
        own = [SecretShape(key, re.compile(re.escape(key))) for key in keys if len(key) >= _SHORTEST_KEY]
        self._patterns = [re.compile(pattern) for pattern in config.patterns]
        chosen = [SecretShape("", pattern) for pattern in self._patterns]
        self._shapes = [*own, *SHAPES, *chosen] if config.secrets else chosen
        self._fields = [tuple(path.split(".")) for path in config.fields]
        shown = any(root != "metadata" and name not in _NOT_SHOWN for root, name, *_ in self._fields)
        self._hides = shown or bool(self._shapes)  # something that a model sees or writes

    def __bool__(self) -> bool:
        """Whether anything is to be redacted."""
        return bool(self._shapes or self._fields)

    def text(self, text: str) -> str:
        """Return the text redacted."""
        for hint, pattern, instead in self._shapes:
            if hint in text and (new := pattern.sub(instead, text)) != text:
                text = new
        return text

    def value(self, value: Any, root: str) -> Any:
        """Return a JSON value redacted. `root`: the first part of the configured paths that apply to it."""
        if not self:
            return value
        try:
            for path in self._fields:
                if path[0] == root:
                    value = _mask_field(value, path[1:])
            return self._texts(value, numbers=root == "event")
        except RecursionError:  # nested deeper than can be looked through
            return MASK

    def event(self, event: Event) -> Event:
        """Return the event without the parts that may not be stored."""
        names = ("name", "value", "arguments", "result")
        return replace(event, **{name: self.value(getattr(event, name), "event") for name in names})

    def start(self, start: CallStart) -> tuple[CallStart, bool]:
        """Return the redacted start of a call, and whether the record may lack something that the model saw.

        It may also lack something if the request continues an earlier response that the server remembers. The original
        text of the request is dropped: if it repeats a name, it holds a value that was not checked.
        """
        start = start._replace(request_text=None)
        unseen = self._hides and start.request.get("previous_response_id") is not None
        request = self.value(start.request, "request")
        model = start.model and self.text(start.model)
        request, before = request if isinstance(request, dict) else {}, start.request
        shown = any(request.get(name) is not before[name] for name in before if name not in _NOT_SHOWN)
        return start._replace(request=request, model=model), shown or unseen

    def end(self, end: CallEnd, *, shown: bool) -> CallEnd:
        """Return the redacted end of a call, without tokens if `shown` (from `start`) or if the response changed."""
        response = self.value(end.response, "response")
        end = end._replace(error=end.error and self.text(end.error), usage=self._texts(end.usage))
        if not shown and response is end.response:
            return end
        response = _without_tokens(response)
        return end._replace(
            response=response,
            tool_calls=tool_calls(response),
            prompt_token_ids=(),
            choices=tuple(Choice(c.index, finish_reason=c.finish_reason) for c in end.choices),
            untrainable_reason=REASON,  # in place of any other reason: nothing may be learned from it
        )

    def _texts(self, value: Any, *, numbers: bool = False) -> Any:
        """The value with its texts redacted and, with `numbers`, also the numbers that match the user's patterns."""
        match value:
            case str():
                return self.text(value)
            case bool():
                return value
            case int() | float() if numbers:
                return None if any(pattern.search(dumps(value)) for pattern in self._patterns) else value
            case list():
                items = [self._texts(item, numbers=numbers) for item in value]
                return value if items == value else items
            case dict():
                numbers = numbers or value.get("type") == "tool_use"
                fields = {self.text(name): self._texts(item, numbers=numbers) for name, item in value.items()}
                return value if fields == value else fields
        return value


def _mask_field(value: Any, path: Sequence[str]) -> Any:
    """The value with everything at `path` masked; `*` stands for any key or index.

    Numbers and booleans become null, because text in their place could not be read back.
    """
    if not path:
        return MASK if isinstance(value, str | list | dict) else None
    name, *rest = path
    if isinstance(value, dict):
        new: Any = {key: _mask_field(item, rest) if name in ("*", key) else item for key, item in value.items()}
    elif isinstance(value, list):
        new = [*_mask_field({str(i): item for i, item in enumerate(value)}, path).values()]
    else:
        return value
    return value if new == value else new


def _without_tokens(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_tokens(item) for item in value]
    if isinstance(value, dict):
        return {name: None if name in _TOKENS else _without_tokens(item) for name, item in value.items()}
    return value
