from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.core.json_text import dumps
from lightning_proxy.store.requests import common_prefix, pack_ids, shrink_request, unpack_ids
from support.calls import stored_and_read

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
requests = st.dictionaries(st.sampled_from(["messages", "tools", "model", "n", "x"]), json_values)


@given(requests, requests)
def test_a_request_survives_being_stored_against_any_parent(request: dict, parent: dict) -> None:
    assert stored_and_read(request, parent) == request


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
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
