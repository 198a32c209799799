"""Bytes become a message or an error that names its field, and nothing else; what is sent is what the contract says."""

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.protocol.wire import codec, errors, internal, limits, messages
from tokenbus.protocol.wire.codec import Decoder, Encoding

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

GENERATE = Decoder(messages.GenerateRequest)
CHUNK = Decoder(messages.Chunk)
RESYNC = Decoder(messages.ResyncRequest)
EMBED = Decoder(messages.EmbedRequest)
EVENTS = Decoder(internal.Events)
RUN = Decoder(internal.Run)
DECODERS: list[Decoder[messages.GenerateRequest] | Decoder[messages.EmbedRequest] | Decoder[internal.Events]] = [
    GENERATE,
    EMBED,
    EVENTS,
]
BOTH = pytest.mark.parametrize("encoding", Encoding)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FIELDS = st.sampled_from([*messages.GenerateRequest.__struct_fields__, "role", "content", "type", "name", "scale", "x"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXTS),
    lambda children: st.one_of(st.lists(children, max_size=4), st.dictionaries(FIELDS, children, max_size=4)),
    max_leaves=12,
)
OBJECTS = st.dictionaries(FIELDS, VALUES, max_size=6)


def to_bytes(value: object, encoding: Encoding) -> bytes:
    return json.dumps(value).encode() if encoding is Encoding.JSON else msgspec.msgpack.encode(value)


def refusal_of(decode: Callable[[], object]) -> errors.Error:
    with pytest.raises(errors.RequestError) as caught:
        decode()
    assert caught.value.error.code is errors.Code.INVALID_REQUEST
    return caught.value.error


def refused(value: Json, encoding: Encoding) -> errors.Error:
    return refusal_of(lambda: GENERATE.decode(to_bytes(value, encoding), encoding))


# Content types


@pytest.mark.parametrize(
    ("headers", "encoding"),
    [
        (None, Encoding.JSON),
        ({}, Encoding.JSON),
        ({"traceparent": "00-1-2-03"}, Encoding.JSON),
        ({"Content-Type": "application/json"}, Encoding.JSON),
        ({"Content-Type": "application/msgpack"}, Encoding.MSGPACK),
        ({"content-type": "application/msgpack"}, Encoding.MSGPACK),
        ({"CONTENT-TYPE": "APPLICATION/MsgPack"}, Encoding.MSGPACK),
        ({"Content-Type": " Application/JSON ; charset=utf-8; q=1"}, Encoding.JSON),
        ({"Content-Type": "application/msgpack;v=1"}, Encoding.MSGPACK),
        ({"x": "y", "Content-Type": "application/msgpack"}, Encoding.MSGPACK),
    ],
)
def test_the_content_type_says_the_encoding(headers: dict[str, str] | None, encoding: Encoding) -> None:
    assert codec.encoding_of(headers) is encoding


@pytest.mark.parametrize("value", ["", ";", "json", "text/plain", "application/x-msgpack", "application/json, x", "é"])
def test_any_other_content_type_is_refused(value: str) -> None:
    with pytest.raises(codec.MediaTypeError, match="application/json or application/msgpack"):
        codec.encoding_of({"Content-Type": value})


@BOTH
def test_what_a_sender_declares_is_what_the_receiver_reads(encoding: Encoding) -> None:
    assert codec.encoding_of(codec.content_headers(encoding)) is encoding


# The lenient reading


@BOTH
def test_integral_floats_are_taken_as_ints(encoding: Encoding) -> None:
    request = GENERATE.decode(to_bytes({"max_tokens": 10.0, "token_ids": [1.0, 2], "seed": -0.0}, encoding), encoding)
    assert (request.max_tokens, request.token_ids, request.seed) == (10, [1, 2], 0)
    assert type(request.max_tokens) is int


@BOTH
def test_ints_are_taken_as_floats(encoding: Encoding) -> None:
    request = GENERATE.decode(to_bytes({"temperature": 1, "timeout_ms": 5}, encoding), encoding)
    assert (request.temperature, request.timeout_ms) == (1.0, 5.0)


@BOTH
@pytest.mark.parametrize("value", [10.5, "10", True, [], {}])
def test_nothing_else_is_taken_as_an_int(value: Json, encoding: Encoding) -> None:
    assert refused({"max_tokens": value}, encoding).param == "max_tokens"


@BOTH
def test_null_is_absent_whatever_the_field(encoding: Encoding) -> None:
    request = dict.fromkeys(messages.GenerateRequest.__struct_fields__)
    assert GENERATE.decode(to_bytes(request, encoding), encoding) == messages.GenerateRequest()
    lora = GENERATE.decode(to_bytes({"lora": [{"name": "a", "scale": None}]}, encoding), encoding).lora
    assert lora == [messages.Lora(name="a", scale=1.0)]
    chunk = CHUNK.decode(to_bytes({"id": "r", "usage": None, "attempt": None, "text": None}, encoding), encoding)
    assert chunk == messages.Chunk(id="r")


@BOTH
def test_null_for_a_field_that_must_be_there_is_refused(encoding: Encoding) -> None:
    error = refusal_of(lambda: RESYNC.decode(to_bytes({"offset": None}, encoding), encoding))
    assert "offset" in error.message


@BOTH
def test_null_in_a_list_is_refused_at_its_place(encoding: Encoding) -> None:
    assert refused({"stop": ["a", None]}, encoding).param == "stop[1]"


@BOTH
def test_free_form_values_are_passed_on_as_they_are(encoding: Encoding) -> None:
    written: dict[str, Json] = {"a": None, "b": 1.0, "c": [None, 2.0], "d": {"e": None}}
    request = GENERATE.decode(
        to_bytes({"chat_template_kwargs": written, "max_tokens": 3.0, "tools": [written]}, encoding), encoding
    )
    assert request.max_tokens == 3
    assert request.chat_template_kwargs == written
    assert request.tools == [written]
    assert request.chat_template_kwargs is not None
    assert type(request.chat_template_kwargs["b"]) is float


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    input: dict[str, Any]
    other: dict[str, Any]
    count: int


def test_a_decoder_may_have_free_form_fields_of_its_own() -> None:
    decoder = codec.Decoder(_Call, free_form=frozenset({"input"}))
    call = decoder.decode(b'{"input": {"a": null}, "other": {"a": null}, "count": 1.0}', codec.Encoding.JSON)
    assert call == _Call(input={"a": None}, other={}, count=1)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"prompt":"a","prompt":"b"}', messages.GenerateRequest(prompt="b")),
        (b'{"prompt":1,"prompt":"b"}', messages.GenerateRequest(prompt="b")),
        (b'{"prompt":{"x":[]},"prompt":"b"}', messages.GenerateRequest(prompt="b")),
        (b'{"prompt":"a","prompt":null}', messages.GenerateRequest()),
        (b'{"prompt":null,"prompt":"b"}', messages.GenerateRequest(prompt="b")),
        (b'{"max_tokens":1.5,"max_tokens":2.0}', messages.GenerateRequest(max_tokens=2)),
        (b'{"lora":[{"name":1,"name":"a"}]}', messages.GenerateRequest(lora=[messages.Lora(name="a")])),
    ],
)
def test_of_duplicate_keys_the_last_wins_in_json(payload: bytes, expected: messages.GenerateRequest) -> None:
    assert GENERATE.decode(payload, Encoding.JSON) == expected


@pytest.mark.parametrize("first", ["a", 1, None, [1.0]])
def test_of_duplicate_keys_the_last_wins_in_messagepack(first: Json) -> None:
    key = msgspec.msgpack.encode("prompt")
    payload = b"\x82" + key + msgspec.msgpack.encode(first) + key + msgspec.msgpack.encode("b")
    assert GENERATE.decode(payload) == messages.GenerateRequest(prompt="b")


def test_of_duplicate_keys_a_wrong_last_one_is_refused() -> None:
    error = refusal_of(lambda: GENERATE.decode(b'{"prompt":"a","prompt":1}', Encoding.JSON))
    assert error.param == "prompt"


@BOTH
def test_unknown_fields_are_ignored(encoding: Encoding) -> None:
    value = {"prompt": "a", "from_the_future": {"x": [1, None, 2.5]}, "max_tokens": 2.0}
    request = GENERATE.decode(to_bytes(value, encoding), encoding)
    assert request == messages.GenerateRequest(prompt="a", max_tokens=2)


def test_token_ids_are_keys_as_decimal_strings_and_in_messagepack_also_as_ints() -> None:
    in_json = GENERATE.decode(b'{"logit_bias":{"12":1,"13":-1.5}}', Encoding.JSON)
    assert in_json.logit_bias == {"12": 1.0, "13": -1.5}
    in_msgpack = GENERATE.decode(msgspec.msgpack.encode({"logit_bias": {"12": 1, 13: -1.5}}))
    assert in_msgpack.logit_bias == {"12": 1.0, 13: -1.5}


# Numbers at the edges


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["max_tokens", "seed", "stop_token_ids"])
def test_no_number_that_is_not_finite_passes_for_an_int(name: str, value: float) -> None:
    written = [value] if name == "stop_token_ids" else value
    refusal_of(lambda: GENERATE.decode(msgspec.msgpack.encode({name: written})))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["temperature", "timeout_ms", "logit_bias", "chat_template_kwargs"])
def test_no_number_that_is_not_finite_passes_in_messagepack(name: str, value: float) -> None:
    written = {"1": value} if name in ("logit_bias", "chat_template_kwargs") else value
    refusal_of(lambda: GENERATE.decode(msgspec.msgpack.encode({name: written})))


def test_no_number_that_is_not_finite_passes_beside_one_that_is_read_leniently() -> None:
    request = {"chat_template_kwargs": {"a": math.inf}, "max_tokens": 1.0}
    refusal_of(lambda: GENERATE.decode(msgspec.msgpack.encode(request)))


@pytest.mark.parametrize("max_tokens", [1, 1.0])
def test_only_fields_that_are_read_and_may_hold_floats_are_searched_for_numbers_that_are_not_finite(
    max_tokens: float,
) -> None:
    request = {"unknown": math.nan, "token_ids": [0xCA7F, 0xCE00] * 8, "max_tokens": max_tokens}
    assert GENERATE.decode(msgspec.msgpack.encode(request)).max_tokens == 1


def test_a_number_that_is_not_finite_is_found_behind_token_ids_that_look_like_one() -> None:
    request = {"token_ids": [0xCA7F, 0xCE00] * 8, "lora": [{"name": "a", "scale": math.nan}]}
    refusal_of(lambda: GENERATE.decode(msgspec.msgpack.encode(request)))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "inf"])
@pytest.mark.parametrize("field", ['"temperature":%s', '"max_tokens":%s', '"chat_template_kwargs":{"a":%s}'])
def test_no_number_that_is_not_finite_passes_in_json(field: str, number: str) -> None:
    refusal_of(lambda: GENERATE.decode(("{" + field % number + "}").encode(), Encoding.JSON))


def test_a_float_is_taken_as_an_int_while_it_is_exact() -> None:
    assert GENERATE.decode(b'{"seed":9007199254740992.0}', Encoding.JSON).seed == 2**53
    packed = msgspec.msgpack.encode({"seed": 2.0**53})
    assert GENERATE.decode(packed).seed == 2**53


@pytest.mark.parametrize("digits", [20, 400, 5_000])
@pytest.mark.parametrize("name", ["temperature", "seed"])
def test_a_huge_integer_is_kept_as_it_is_or_refused(name: str, digits: int) -> None:
    written = "9" * digits
    try:
        request = GENERATE.decode(f'{{"{name}":{written}}}'.encode(), Encoding.JSON)
    except errors.RequestError as refusal:
        assert refusal.error.code is errors.Code.INVALID_REQUEST
        assert digits > 20
        return
    expected = float(written) if name == "temperature" else int(written)
    assert getattr(request, name) == expected


def test_hashes_use_all_64_bits() -> None:
    run = internal.BlockRun(parent=2**64 - 1, hashes=[2**63, 0])
    load = messages.Load()
    events = internal.Events(
        worker_id="w", epoch="e", seq=0, load=load, state=messages.WorkerState.READY, stored=[run], removed=[2**64 - 1]
    )
    assert EVENTS.decode(codec.encode(events)) == events


# What is no message at all


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"{",
        b'{"prompt":"x"',
        b'{"prompt":"x"} {}',
        b'{"prompt":"x"}\x00',
        b'{"prompt":"x",}',
        b"{'prompt':'x'}",
        b'\xef\xbb\xbf{"prompt":"x"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\udc00 and more text behind it"}',
        b'{"prompt":"\\ud800\\u0041"}',
        b'{"stop":["\\ud800 and more text behind it"]}',
        b'{"prompt":"\n"}',
        b"\x81\xa6prompt\xa1x",
    ],
)
def test_what_is_no_json_message_is_refused(payload: bytes) -> None:
    refusal_of(lambda: GENERATE.decode(payload, Encoding.JSON))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x01",
        b"\xc1",
        b"\x81",
        b"\x81\xa6prompt",
        b"\x80\x80",
        b"\x80\x00",
        b"\x81\xa6prompt\xa1\xff",
        b"\x81\xa6prompt\xa3\xed\xa0\x80",
        b"\x81\xa6prompt\xc4\x01x",
        b"\x81\xa6prompt\xd6\xff\x00\x00\x00\x00",
        b"\x81\x80\x01",
        b"\x81\x91\x80\x01",
        b"\x81\xc0\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa6prompt\xdb\xff\xff\xff\xffx",
        b'{"prompt":"x"}',
    ],
)
def test_what_is_no_messagepack_message_is_refused(payload: bytes) -> None:
    refusal_of(lambda: GENERATE.decode(payload, Encoding.MSGPACK))


@pytest.mark.parametrize("payload", [b'{"x":' * 100_000, b"[" * 100_000, b'{"prompt":' + b"[" * 100_000])
def test_json_without_a_bottom_is_refused(payload: bytes) -> None:
    assert "deep" in refusal_of(lambda: GENERATE.decode(payload, Encoding.JSON)).message


@pytest.mark.parametrize("payload", [b"\x91" * 100_000, b"\x81\xa1x" * 100_000, b"\x81\xa6prompt" + b"\x91" * 100_000])
def test_messagepack_without_a_bottom_is_refused(payload: bytes) -> None:
    assert "deep" in refusal_of(lambda: GENERATE.decode(payload, Encoding.MSGPACK)).message


def nested(levels: int) -> Json:
    value: Json = 1
    for level in range(levels - 1):
        value = [value] if level % 2 else {"a": value}
    return value


@BOTH
def test_only_so_many_values_are_read_leniently(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MAX_LENIENT_VALUES", 20)
    few, many = ([{"role": "user", "content": "hi"}] * number for number in (4, 8))
    lenient: dict[str, object] = {"max_tokens": 5.0, "token_ids": [1] * 99, "chat_template_kwargs": {"a": [{}] * 99}}
    assert GENERATE.decode(to_bytes(lenient | {"messages": few}, encoding), encoding).max_tokens == 5
    strict = lenient | {"messages": many, "max_tokens": 5}
    assert len(GENERATE.decode(to_bytes(strict, encoding), encoding).messages or []) == 8
    error = refusal_of(lambda: GENERATE.decode(to_bytes(lenient | {"messages": many}, encoding), encoding))
    assert error.message == "the message has more than 20 values, and not all of the right types"


def test_free_form_values_nest_to_the_limit_and_not_one_level_deeper() -> None:
    codec.check_nesting(nested(limits.MAX_NESTING), "tools")
    error = refusal_of(lambda: codec.check_nesting(nested(limits.MAX_NESTING + 1), "tools"))
    assert error.param == "tools"


@given(st.binary(max_size=200), st.sampled_from(Encoding))
@settings(max_examples=200)
def test_any_bytes_are_a_message_or_a_refusal(payload: bytes, encoding: Encoding) -> None:
    for decoder in DECODERS:
        try:
            decoder.decode(payload, encoding)
        except errors.RequestError as refusal:
            assert refusal.error.code is errors.Code.INVALID_REQUEST


@given(st.one_of(OBJECTS, VALUES), st.sampled_from(Encoding))
@settings(max_examples=200)
def test_any_value_is_a_message_or_a_refusal(value: object, encoding: Encoding) -> None:
    payload = to_bytes(value, encoding)
    for decoder in DECODERS:
        try:
            decoder.decode(payload, encoding)
        except errors.RequestError as refusal:
            assert refusal.error.code is errors.Code.INVALID_REQUEST


@given(OBJECTS, st.data(), st.sampled_from(Encoding))
@settings(max_examples=150)
def test_a_message_cut_short_is_refused(value: object, data: st.DataObject, encoding: Encoding) -> None:
    payload = to_bytes(value, encoding)
    cut = data.draw(st.integers(0, len(payload) - 1))
    refusal_of(lambda: GENERATE.decode(payload[:cut], encoding))


@given(OBJECTS)
@settings(max_examples=150)
def test_both_encodings_of_a_value_are_read_alike(value: dict[str, object]) -> None:
    finite = json.loads(json.dumps(value), parse_constant=lambda _: 0.5)

    def outcome(encoding: Encoding) -> object:
        try:
            return GENERATE.decode(to_bytes(finite, encoding), encoding)
        except errors.RequestError as refusal:
            return refusal.error.code

    assert outcome(Encoding.JSON) == outcome(Encoding.MSGPACK)


# The field at fault


@BOTH
@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"prompt": 1}, "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"token_ids": [1, 2, "3"]}, "token_ids[2]"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": 1}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}, {"type": 1}]}]}, "messages[0].content[1].type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"lora": [{"name": "a", "scale": "x"}]}, "lora[0].scale"),
        ({"resume_from": {"token_ids": [1], "hash_scheme": 0}}, "resume_from.hash_scheme"),
        ({"routing": {"explain": 1}}, "routing.explain"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"tools": [1]}, "tools[0]"),
        ({"stream": "yes"}, "stream"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ],
)
def test_a_refusal_names_the_path_of_the_field(value: Json, param: str, encoding: Encoding) -> None:
    error = refused(value, encoding)
    assert error.param == param
    assert param in error.message


@BOTH
def test_a_refusal_names_the_field_also_where_others_had_to_be_read_leniently(encoding: Encoding) -> None:
    error = refused({"max_tokens": 5.0, "prompt": None, "stop": ["a", None]}, encoding)
    assert error.param == "stop[1]"


def test_a_refusal_of_a_key_names_the_field_that_holds_it() -> None:
    error = refusal_of(lambda: GENERATE.decode(msgspec.msgpack.encode({"logit_bias": {1.5: 1.0}})))
    assert error.param is not None
    assert error.param.startswith("logit_bias")


def test_a_sender_can_not_write_the_path_in_a_refusal() -> None:
    error = refused({"response_format": {"type": "x - at `$.prompt"}}, Encoding.JSON)
    assert error.param == "response_format.type"


def test_a_type_is_inspected_once_for_all_messages_that_are_wrong() -> None:
    wrong = b'{"prompt": "x", "tool_choice": 5}'
    codec._type_info.cache_clear()
    for _ in range(3):
        with pytest.raises(errors.RequestError):
            GENERATE.decode(wrong, Encoding.JSON)
    assert codec._type_info.cache_info().misses == 1
