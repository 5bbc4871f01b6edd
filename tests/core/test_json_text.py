"""JSON text comes back as it was: numbers of any size and length, lone surrogates, deep nesting."""

import copy
import json
import pickle
from decimal import Decimal
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.core.json_text import dumps, encode, encode_as_vllm, encoded_parts, loads, loads_in_turns
from lightning_proxy.store.requests import common_prefix, pack_ids, shrink_request, unpack_ids
from support.calls import stored_and_read
from support.fuzzing import examples

NUMBERS = [
    "0", "-0.0", "1", "1.0", "1e5", "-1.5E+3", "18446744073709551615", "18446744073709551616", "-9223372036854775809",
    "123456789012345678901234567890", "0.1234567890123456789", "3.14159265358979323846264338327950288",
    "-123456789.12345678901234567890", "9007199254740993.0", "1e400", "-1E400", "1e-400", "5e-324",
    "1.7976931348623159e308", "123456789012345678901234567890.5e-10", "9" * 5000, "0." + "1" * 5000,
    "1e999999999999999999999999", "0e99999999999999999",
]  # fmt: skip


def exactly(text: str | bytes) -> Any:
    """The value with every number as written."""
    return json.loads(text, parse_int=lambda digits: ("whole", Decimal(digits)), parse_float=_decimal)


def _decimal(digits: str) -> Any:
    try:
        return "fraction", Decimal(digits)
    except ArithmeticError:
        return "fraction", digits


def test_a_number_is_written_as_it_was_read_however_deep() -> None:
    deep = "[" * 400 + "1" + "]" * 400  # too deep for orjson
    assert encode(loads(deep)) == deep.encode()
    around = ("%s", '{"a":[1,%s,2.5],"logprob":-0.12345678901234566}', '{"\\ud800":%s}')
    for text in (place % number for place in around for number in NUMBERS):
        for value in (loads(text), loads(text.encode()), loads_in_turns(text)):
            assert exactly(dumps(value)) == exactly(text), text[:80]
            assert exactly(encode_as_vllm(value)) == exactly(text), text[:80]
            if isinstance(value, dict):
                assert exactly(b"".join(encoded_parts(value, 4))) == exactly(text), text[:80]


JSON_NUMBERS = st.from_regex(r"\A-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?\Z")


@examples(500)
@given(st.lists(JSON_NUMBERS, min_size=1, max_size=5), st.lists(st.floats(-30, 0), max_size=3))
def test_numbers_beside_logprobs_are_written_as_they_were_read(numbers: list[str], logprobs: list[float]) -> None:
    tokens = ",".join(f'{{"logprob":{logprob!r}}}' for logprob in logprobs)
    text = f'{{"id":"3e-123","numbers":[{",".join(numbers)}],"content":[{tokens}]}}'
    assert exactly(dumps(loads(text))) == exactly(text)


def test_a_long_number_is_a_float_for_all_who_calculate() -> None:
    number = loads("0.1234567890123456789")
    assert number == 0.1234567890123456789
    assert [copy.deepcopy(number).text, pickle.loads(pickle.dumps(number)).text] == ["0.1234567890123456789"] * 2


def test_log_probabilities_of_vllm_are_read_at_orjsons_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_proxy.core.json_text.loads_in_turns", None)
    text = orjson.dumps({"content": [{"token": "a", "logprob": -0.12345678901234567, "bytes": [97]}] * 9})
    assert loads(text) == orjson.loads(text)
    loads(b'{"choices":[{"logprobs":{"token_logprobs":[-0.12345678901234567]}}]}')


def test_requests_that_differ_in_the_last_digit_are_not_the_same() -> None:
    first, second = loads('{"x":0.12345678901234567890,"y":1e400}'), loads('{"x":0.12345678901234567891,"y":1e401}')
    assert dumps(stored_and_read(second, first)) == '{"x":0.12345678901234567891,"y":1e401}'


# What is stored of a request: its difference from an earlier one.


def test_messages_that_only_python_takes_for_equal_are_kept_apart() -> None:
    equal = (({"n": True}, {"n": 1}), ({"n": 1}, {"n": 1.0}), ({"a": 0, "b": 0}, {"b": 0, "a": 0}), (0.0, -0.0))
    for one, other in equal:
        second = {"messages": [other, "second"]}
        assert dumps(stored_and_read(second, {"messages": [one]})) == dumps(second)


def test_a_growing_conversation_stores_only_its_new_messages() -> None:
    messages = [{"role": "user", "content": str(i) * 100} for i in range(50)]
    stored = shrink_request({"messages": messages, "model": "m"}, {"messages": messages[:49], "model": "m"})
    assert stored == {"new": {"messages": messages[49:], "model": "m"}, "shared": {"messages": 49}}


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_token_ids_survive_packing_and_their_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    assert unpack_ids(pack_ids([2**31 - 1, *a])) == (2**31 - 1, *a)
    n = common_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])
