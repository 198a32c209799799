"""Requests for embeddings are validated, and vectors are written in both encodings."""

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.wire import errors, limits, messages
from tokenbus.protocol.wire.checks import pooling


def refused(**fields: object) -> errors.Error:
    with pytest.raises(errors.RequestError) as refusal:
        pooling.check_embed_request(messages.EmbedRequest(**fields))  # type: ignore[arg-type]
    return refusal.value.error


def test_a_text_is_a_list_of_one() -> None:
    assert pooling.check_embed_request(messages.EmbedRequest(input="x")).inputs == ["x"]


def test_texts_and_token_ids_may_be_mixed() -> None:
    work = pooling.check_embed_request(messages.EmbedRequest(input=["x", [1, limits.MAX_TOKEN_ID]]))
    assert work.inputs == ["x", [1, limits.MAX_TOKEN_ID]]


def test_what_is_left_out_has_the_wire_s_default() -> None:
    work = pooling.check_embed_request(messages.EmbedRequest(input="x"))
    assert (work.normalize, work.dimensions, work.remaining_ms) == (True, None, 60_000.0)
    assert not pooling.check_embed_request(messages.EmbedRequest(input="x", normalize=False)).normalize


def test_as_many_inputs_as_the_limit_are_taken_and_one_more_is_not() -> None:
    most = limits.MAX_EMBED_INPUTS
    assert len(pooling.check_embed_request(messages.EmbedRequest(input=["x"] * most)).inputs) == most
    assert str(most) in refused(input=["x"] * (most + 1)).message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": ["x", []]}, "input[1]"),
        ({"input": [[1, -1]]}, "input[0]"),
        ({"input": [[limits.MAX_TOKEN_ID + 1]]}, "input[0]"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "timeout_ms": 0.0}, "timeout_ms"),
        ({"input": "x", "timeout_ms": float("nan")}, "timeout_ms"),
        ({"input": "x", "id": "a b"}, "id"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (errors.Code.INVALID_REQUEST, param)


@given(st.integers(1, 5), st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9))
def test_numbers_and_base64_say_the_same(count: int, row: list[float]) -> None:
    packed = struct.pack(f"<{len(row)}f", *row) * count
    assert pooling.to_rows(packed, count, "float") == [row] * count
    assert pooling.to_rows(packed, count, None) == [row] * count
    for text in pooling.to_rows(packed, count, "base64"):
        assert isinstance(text, str)
        assert list(struct.unpack(f"<{len(row)}f", base64.b64decode(text))) == row
