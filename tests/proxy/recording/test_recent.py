"""What the memory for recent calls counts: the text that is there, once, and no text that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.proxy.recording.recent import RecentCall, RecentCalls, parent_of, sharing

EACH, BYTES = 4, 1000
Messages = list[dict[str, Any]]


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Rollouts:
    """Calls as the recorder remembers them; each message takes `BYTES`."""

    def __init__(self) -> None:
        self.recent = RecentCalls(10**9, EACH)

    def call(self, messages: Messages) -> None:
        request = {"messages": messages}
        parent, shared = parent_of(request, self.recent.of("r"))
        call = RecentCall(str(id(messages)), sharing(request, parent, shared), first_own=shared)
        self.recent.add("r", call, BYTES * (len(messages) - shared))

    @property
    def there(self) -> int:
        """The bytes that the remembered calls take."""
        kept = self.recent.of("r")
        return BYTES * len({id(one) for call in kept for one in call.request["messages"]})


def chain(n: int) -> list[Messages]:
    return [[message(f"turn {i}") for i in range(length + 1)] for length in range(n)]


def edited(n: int) -> list[Messages]:
    """A conversation whose third message differs at each call."""
    return [[message("a"), message("b"), message(f"edit {i}"), message("c")] for i in range(n)]


def unrelated(n: int) -> list[Messages]:
    return [[message(f"{i}: {k}") for k in range(5)] for i in range(n)]


@pytest.mark.parametrize("shape", [chain, edited, unrelated])
def test_the_text_of_a_forgotten_call_counts_as_long_as_another_one_has_it(shape: Any) -> None:
    rollouts = Rollouts()
    for messages in shape(20):
        rollouts.call(messages)
        assert rollouts.recent._kept == rollouts.there
    rollouts.recent.forget("r")
    assert rollouts.recent._kept == 0
