"""Messages come back as they were sent, and have no more in them than they were given."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.wire import codec, errors, internal, messages
from tokenbus.protocol.wire.codec import Decoder, Encoding
from tokenbus.protocol.wire.messages import FinishReason

CHUNK = Decoder(messages.Chunk)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BOTH = pytest.mark.parametrize("encoding", Encoding)
CHUNKS = st.builds(
    messages.Chunk,
    id=TEXTS,
    attempt=st.integers(0, 9),
    offset=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    text_offset=st.integers(0, 2**31),
    text=TEXTS,
    finish_reason=st.one_of(st.none(), st.sampled_from(FinishReason)),
    worker_id=st.one_of(st.just(msgspec.UNSET), TEXTS),
    model=st.one_of(st.just(msgspec.UNSET), TEXTS),
    created=st.one_of(st.just(msgspec.UNSET), st.integers(0, 2**33)),
    token_ids=st.one_of(st.just(msgspec.UNSET), st.lists(st.integers(0, 2**32 - 1), max_size=3)),
    logprobs=st.one_of(
        st.just(msgspec.UNSET),
        st.lists(
            st.builds(
                messages.TokenLogprob,
                id=st.integers(0, 9),
                text=TEXTS,
                bytes=st.lists(st.integers(0, 255), max_size=3),
                logprob=st.floats(-100, 0),
                top=st.just([]),
            ),
            max_size=2,
        ),
    ),
    usage=st.one_of(
        st.just(msgspec.UNSET),
        st.builds(
            messages.Usage,
            prompt_tokens=st.integers(0, 9),
            completion_tokens=st.integers(0, 9),
            total_tokens=st.integers(0, 18),
            cached_tokens=st.integers(0, 9),
        ),
    ),
    stop_match=st.one_of(st.just(msgspec.UNSET), TEXTS, st.integers(0, 2**32 - 1)),
    error=st.one_of(
        st.just(msgspec.UNSET), st.builds(errors.make_error, st.sampled_from(errors.Code), TEXTS, param=TEXTS)
    ),
)


@given(CHUNKS, st.sampled_from(Encoding))
def test_a_chunk_comes_back_as_it_was(chunk: messages.Chunk, encoding: Encoding) -> None:
    assert CHUNK.decode(codec.encode(chunk, encoding), encoding) == chunk


@given(CHUNKS, st.sampled_from(Encoding))
def test_a_chunk_has_its_seven_fields_and_what_it_was_given(chunk: messages.Chunk, encoding: Encoding) -> None:
    payload = codec.encode(chunk, encoding)
    sent = json.loads(payload) if encoding is Encoding.JSON else msgspec.msgpack.decode(payload)
    given_fields = {name for name, value in msgspec.structs.asdict(chunk).items() if value is not msgspec.UNSET}
    assert set(sent) == given_fields
    assert given_fields >= {"id", "attempt", "offset", "tokens", "text_offset", "text", "finish_reason"}
    assert sent["finish_reason"] == chunk.finish_reason


def test_the_simplest_chunk_is_these_bytes() -> None:
    assert codec.encode(messages.Chunk(id="r"), Encoding.JSON) == (
        b'{"id":"r","attempt":0,"offset":0,"tokens":0,"text_offset":0,"text":"","finish_reason":null}'
    )


def test_a_router_s_own_message_has_worker_id_null() -> None:
    assert b'"worker_id":null' in codec.encode(messages.Chunk(id="r", worker_id=None), Encoding.JSON)


def test_an_error_leaves_out_what_it_does_not_know() -> None:
    reply = internal.RunReply(accepted=False, error=errors.make_error(errors.Code.NO_WORKER))
    sent = msgspec.msgpack.decode(codec.encode(reply))
    assert sent == {
        "accepted": False,
        "error": {"code": "no_worker", "message": "no worker serves the model now", "retryable": True},
    }


@BOTH
def test_text_with_a_lone_surrogate_can_not_be_sent(encoding: Encoding) -> None:
    with pytest.raises(UnicodeEncodeError):
        codec.encode(messages.Chunk(id="r", text="\ud800"), encoding)


def test_a_value_that_is_not_there_is_unset() -> None:
    assert codec.unset_if_none(None) is msgspec.UNSET
    assert codec.unset_if_none(0) == 0
    assert codec.unset_if_none("") == ""


def test_the_headers_of_an_error_show_status_and_code() -> None:
    headers = codec.error_headers(errors.make_error(errors.Code.OVERLOADED, "full"))
    assert headers == {"Nats-Service-Error-Code": "429", "Nats-Service-Error": "overloaded: full"}


def test_the_headers_of_an_error_are_short_however_long_its_message_is() -> None:
    headers = codec.error_headers(errors.make_error(errors.Code.OVERLOADED, "x" * 100_000))
    assert len(headers["Nats-Service-Error"]) == 512
