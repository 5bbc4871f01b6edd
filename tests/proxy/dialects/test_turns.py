"""The exact prompt of a next turn, for every way in which an answer may have been sampled as tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.proxy.dialects.turns import TokenTurn, as_sampled, closing, exact_prompt

Json = dict[str, Any]
Render = Callable[[Sequence[Json], bool], str]

START, END = "\x01", "\x02"  # special tokens: they are never part of another one
MERGES = {"ab": 1000, "bc": 1001, "abc": 1002, ".\n": 1003, "\n\n": 1004, "a.": 1005}
TEXT_OF = {number: text for text, number in MERGES.items()}
TEXTS = st.text("abc. \n", min_size=1, max_size=8)


def chatml(messages: Sequence[Json], ask: bool) -> str:
    told = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return told + f"{START}assistant\n" * ask


def late_end(messages: Sequence[Json], ask: bool) -> str:
    """Ends a turn only where another one follows, as some templates do."""
    return END.join(f"{START}{m['role']}\n{m['content']}" for m in messages) + f"{END}{START}assistant\n" * ask


def plain(messages: Sequence[Json], ask: bool) -> str:
    """No special tokens: what follows an answer may become one token with its end."""
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: " * ask


def tokenize(text: str, cuts: Sequence[bool] = (True,)) -> list[int]:
    """The longest token first, as a tokenizer cuts a text up; where `cuts` say no, a character, as a model may."""
    ids: list[int] = []
    while text:
        longest = next(n for n in (3, 2, 1) if n == 1 or text[:n] in MERGES)
        size = longest if cuts[len(ids) % len(cuts)] else 1
        ids.append(MERGES.get(text[:size], ord(text[0])))
        text = text[size:]
    return ids


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXT_OF.get(token, chr(token % 0x110000)) for token in ids)


def next_prompt(render: Render, turn: TokenTurn, messages: Sequence[Json]) -> Any:
    end = closing(*(tokenize(render([user("0"), assistant(text)], False)) for text in ("0", "1")))
    history, whole = tokenize(render(messages[: len(turn.messages) + 1], False)), tokenize(render(messages, True))
    return exact_prompt(turn, history, whole, end)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Json:
    return {"role": "assistant", "content": text, **more}


def turn_of(
    messages: list[Any], answer: Json, prompt: Sequence[int], ids: Sequence[int], why: str = "stop", rendered: Any = ()
) -> TokenTurn:
    return TokenTurn(messages, {}, answer, array("i", [*prompt, *ids]), len(ids), why, array("i", rendered or prompt))


@given(st.data(), st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=4), st.sampled_from([chatml, late_end]))
def test_a_conversation_stays_one_row_whatever_was_sampled(data: Any, said: list[tuple[str, str]], render: Any) -> None:
    messages: list[Json] = []
    row: list[int] = []
    turn: TokenTurn | None = None
    for asked, answered in said:
        messages = [*messages, user(asked)]
        prompt = tokenize(render(messages, True)) if turn is None else next_prompt(render, turn, messages)
        assert prompt[: len(row)] == row
        assert decode(prompt) == render(messages, True)  # every end of turn is there, and there once
        ids = tokenize(answered, data.draw(st.lists(st.booleans(), min_size=1, max_size=8)))
        why = data.draw(st.sampled_from(["stop", "length"]))
        row = [*prompt, *ids, *[ord(END)] * (why == "stop")]
        turn = turn_of(messages, assistant(answered), prompt, row[len(prompt) :], why, tokenize(render(messages, True)))
        messages = [*messages, assistant(answered)]


@given(TEXTS, TEXTS)
def test_a_template_without_special_tokens_gives_the_right_text_or_none(answer: str, more: str) -> None:
    asked = [user("a")]
    prompt = tokenize(plain(asked, True))
    turn = turn_of(asked, assistant(answer), prompt, tokenize(answer), "length")
    messages = [*asked, assistant(answer), user(more)]
    if (found := next_prompt(plain, turn, messages)) is not None:
        assert found[: len(turn.ids)] == turn.ids.tolist()
        assert decode(found) == plain(messages, True)


def test_an_answer_is_known_by_its_tokens_unless_it_renders_to_others() -> None:
    asked, told = [user("a")], assistant("abc")
    prompt, whole = tokenize(chatml(asked, True)), tokenize(chatml([*asked, told, user("c")], True))
    for why, end in (("stop", [ord(END)]), ("length", [])):
        for cut, renders_so in (([MERGES["abc"]], True), ([MERGES["ab"], ord("c")], False)):
            turn, closing = turn_of(asked, told, prompt, [*cut, *end], why), tokenize(f"{END}\n")
            found = exact_prompt(turn, as_sampled(turn, closing), whole, closing)
            assert found == (whole if renders_so else None)
