"""What is a secret in a text, what is none, and that no text takes long to look through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.core.config.server import RedactConfig
from lightning_proxy.core.redact import MASK, SHAPES, Redactor
from lightning_proxy.store.keys import new_key

OPENAI = "sk-proj-Zx81kQpLmN0vBt7RyWc3HdJf5GsA2eUo9Ii6"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_what_holds_no_secret_is_left_as_it_is(value: Any) -> None:
    assert Redactor(RedactConfig(secrets=True)).value(value, "request") is value


def test_a_secret_is_found_behind_an_escape() -> None:
    redactor = Redactor(RedactConfig(secrets=True))
    for text in ("a\\nsk-", 'x="sk-', "?key=%20sk-", "\\u000ask-", "key:sk-", "(sk-"):
        masked = redactor.text(text + OPENAI[3:])
        assert masked == redactor.text(masked) == text[:-3] + MASK


def test_our_own_keys_and_those_of_the_configuration_are_secrets() -> None:
    redactor = Redactor(RedactConfig(secrets=True), ["a configured key", "short"])
    named = [f"lpk-{kind}-{'x1' * 20}" for kind in ("reward", "whatever")]
    for key in (new_key("agent"), new_key("admin"), new_key("rollout"), "a configured key", *named):
        assert redactor.text(f"key={key}.") == f"key={MASK}."
    assert redactor.text("in short") == "in short"


def hostile_repeats() -> Iterator[Callable[[int], str]]:
    """Texts of any length in which secrets seem to begin, and never end as one does."""
    runs = ["", "a", "-", "_", ".", " ", "/", "=", "\n", "\\n", "%20", "a.", "aaaaaaaaaaaaaaa ", "-----END a"]
    words = ["PRIVATE KEY", "-----BEGIN PRIVATE KEY-----", "secretaccesskey", "aws_secret_access_key="]
    for hint in (*dict.fromkeys(shape.hint for shape in SHAPES), *words):
        for run in runs:
            yield lambda n, unit=hint + run: unit * (n // len(unit))  # type: ignore[misc]
            yield lambda n, hint=hint, run=run or hint: hint + run * (n // len(run))  # type: ignore[misc]


def test_no_text_takes_many_times_as_long_to_redact_as_a_harmless_one() -> None:
    """The processor's time. Twice the text takes twice as long: with its square, 100 times would be long past."""
    redactor = Redactor(RedactConfig(secrets=True))

    def seconds(text: str) -> float:
        began = time.thread_time()
        redactor.text(text)
        return time.thread_time() - began

    harmless = max(seconds("a word " * (2**14 // 7)) for _ in range(5))
    for text in hostile_repeats():
        assert min(seconds(text(2**14)) for _ in range(2)) < 25 * harmless, text(80)


def test_what_is_nested_too_deeply_is_not_stored_at_all() -> None:
    deep: Any = "zzz"
    for _ in range(5000):
        deep = [deep]
    redactor = Redactor(RedactConfig(patterns=["zzz"]))
    assert redactor.value(deep, "response") == MASK
