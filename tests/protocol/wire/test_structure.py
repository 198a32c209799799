"""What a message is made of is counted before it is decoded, exactly where it matters."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.wire import codec, errors, limits, messages, structure
from tokenbus.protocol.wire.codec import Encoding

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.sampled_from(["[" * 300, '\\{"' * 200, "x" * 70_000, "测" * 30]),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20),
    max_leaves=40,
)


def num_in(value: Any) -> tuple[int, int]:
    """Lists and objects, and these together with the strings."""
    if isinstance(value, str):
        return 0, 1
    if not isinstance(value, (list, dict)):
        return 0, 0
    children = value if isinstance(value, list) else [*value, *value.values()]
    counts = [num_in(child) for child in children]
    return 1 + sum(one for one, _ in counts), 1 + sum(both for _, both in counts)


@given(VALUES, st.integers(0, 60))
def test_a_message_has_more_only_if_it_really_has(value: Any, most: int) -> None:
    containers, both = num_in(value)
    for encoded, has_more in (
        (json.dumps(value, ensure_ascii=False).encode(), structure.json_has_more),
        (msgspec.msgpack.encode(value), structure.msgpack_has_more),
    ):
        found = has_more(encoded, most)
        assert found is True or containers <= most
        assert found is False or both > most


@given(st.binary(max_size=60), st.integers(0, 30))
def test_any_bytes_are_counted(payload: bytes, most: int) -> None:
    structure.json_has_more(payload, most)
    structure.msgpack_has_more(payload, most)


@pytest.mark.parametrize(
    "head", [b"\xd4\x01", b"\xd8\x01" + b"\x90" * 15, b"\xc7\x01\x05", b"\xc8\x00\x01\x05", b"\xc4\x01"]
)
def test_bytes_within_binary_values_are_no_lists(head: bytes) -> None:
    assert not structure.msgpack_has_more((head + b"\x90") * 5, 5)
    assert structure.msgpack_has_more((head + b"\x90\x90") * 5, 9)


def test_a_message_of_too_many_lists_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 20)
    for encoding in Encoding:
        to_bytes = msgspec.json.encode if encoding is Encoding.JSON else msgspec.msgpack.encode
        codec.check_structure(to_bytes({"input": [[1]] * 10, "query": "[{" * 100}), encoding)
        with pytest.raises(errors.RequestError) as refused:
            codec.check_structure(to_bytes({"input": [[]] * 21}), encoding)
        assert refused.value.error.message == "the message has more than 20 lists, objects and strings"
        with pytest.raises(errors.RequestError) as refused:
            codec.Decoder(messages.EmbedRequest).decode(to_bytes({"input": [{}] * 21}), encoding)
        assert "more than 20 lists" in refused.value.error.message, "not decoded without types either"
