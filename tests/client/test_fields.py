"""Keywords and replies of the library say what the messages of the wire say, and mistakes in them are named."""

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

import tokenbus
from tokenbus import client as library
from tokenbus.client import answer, replies
from tokenbus.client.client import Client
from tokenbus.client.stream import Stream
from tokenbus.client.sync_client import SyncClient, SyncStream
from tokenbus.client.wire import field_reader, request_fields
from tokenbus.protocol.wire import errors, messages

FIELDS = {
    messages.GenerateRequest: request_fields.GenerateFields,
    messages.EmbedRequest: request_fields.EmbedFields,
    messages.RerankRequest: request_fields.RerankFields,
    messages.TokenizeRequest: request_fields.TokenizeFields,
    messages.DetokenizeRequest: request_fields.DetokenizeFields,
    messages.ChatMessage: request_fields.ChatMessageFields,
    messages.ContentPart: request_fields.ContentPartFields,
    messages.ResumeFrom: request_fields.ResumeFields,
    messages.RoutingOptions: request_fields.RoutingFields,
    messages.ReasoningOptions: request_fields.ReasoningFields,
    messages.ResponseFormat: request_fields.ResponseFormatFields,
    messages.JsonSchema: request_fields.JsonSchemaFields,
    messages.CacheControl: request_fields.CacheControlFields,
    messages.Lora: request_fields.LoraFields,
}
HIDDEN_FIELDS = {messages.EmbedRequest: {"encoding"}, messages.DetokenizeRequest: {"return_pieces"}}
"""Fields that the library sets itself, or that only the gateway uses."""
REPLIES = {
    messages.Chunk: answer.AnswerChunk,
    messages.Usage: answer.TokenUsage,
    messages.Timings: answer.AnswerTimings,
    messages.EmbedReply: replies.Embeddings,
    messages.RerankReply: replies.Ranking,
    messages.TokenizeReply: replies.PromptTokens,
    messages.ServedModel: replies.ServedModelInfo,
}
HIDDEN_REPLIES: Mapping[type, set[str]] = {
    messages.Chunk: {
        *("attempt", "offset", "text_offset", "prompt_offset", "reasoning_offset", "rate_limits", "error"),
    },
    messages.EmbedReply: {"id", "rate_limits", "error"},
    messages.RerankReply: {"id", "rate_limits", "error"},
    messages.TokenizeReply: {"id", "error", "continues"},
    messages.ServedModel: {"model", "workers", "summary", "engines", "engine_bytes", "since_ms"},
}
"""Fields with which the library puts streams in order, or that it raises; a model's name is its `name`."""
ABSENT = (type(None), msgspec.UnsetType)


def shape(hint: Any) -> Any:
    """The values that a type allows, whether it is one of a message or of a keyword."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) in (typing.Required, typing.Annotated) else hint
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = {shape(one) for one in inner if one not in ABSENT}
        # dictionaries of any kind are one, and a mapping by either key is a mapping by both
        merged = {one for one in found if not (isinstance(one, tuple) and one[0] == "map")}
        keys = frozenset().union(*(one[1] for one in found if isinstance(one, tuple) and one[0] == "map"))
        merged |= {("map", keys)} if keys else set()
        return frozenset(merged) if len(merged) > 1 else next(iter(merged))
    if origin in (list, Sequence):
        return ("list", shape(inner[0]))
    if origin in (dict, Mapping):
        keys = shape(inner[0])
        return ("map", keys if isinstance(keys, frozenset) else frozenset({keys}))
    if hint in FIELDS or hint in FIELDS.values():
        return ("map", frozenset({str}))
    return hint


@pytest.mark.parametrize(("struct", "fields"), FIELDS.items(), ids=[one.__name__ for one in FIELDS])
def test_keywords_are_the_fields_of_the_message_with_their_types(struct: Any, fields: Any) -> None:
    of_wire = typing.get_type_hints(struct)
    of_library = typing.get_type_hints(fields, include_extras=True)
    assert set(of_library) == set(of_wire) - HIDDEN_FIELDS.get(struct, set())
    for name, hint in of_library.items():
        assert shape(hint) == shape(of_wire[name]), name


def test_every_struct_in_a_request_has_its_keywords() -> None:
    for struct in FIELDS:
        for inner in filter(None, map(field_reader._struct_in, typing.get_type_hints(struct).values())):
            assert inner in FIELDS


@pytest.mark.parametrize(("struct", "reply"), REPLIES.items(), ids=[one.__name__ for one in REPLIES])
def test_replies_have_what_the_message_has_and_nothing_unset(struct: Any, reply: Any) -> None:
    of_wire, of_library = typing.get_type_hints(struct), typing.get_type_hints(reply)
    assert set(of_wire) - set(of_library) == HIDDEN_REPLIES.get(struct, set())
    for hint in of_library.values():
        assert "Unset" not in str(hint)


def test_what_is_unset_in_a_message_is_none_or_empty_for_its_reader() -> None:
    usage = messages.Usage(prompt_tokens=1, completion_tokens=0, total_tokens=1, cached_tokens=0)
    timings = messages.Timings(queue_ms=1, prefill_ms=1, ttft_ms=1, decode_ms=1, total_ms=1)
    for chunk in (messages.Chunk(id="r"), messages.Chunk(id="r", usage=usage, timings=timings)):
        assert "UNSET" not in repr(answer.chunk_of(chunk))
    assert answer.chunk_of(messages.Chunk(id="r", stop_match=0, load_progress=0.0)).stop_match == 0


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temprature": 0}, "temprature", "did you mean temperature?"),
        ({"xyzzy": 0}, "xyzzy", "the fields are cache_control, "),
        ({"max_tokens": "many"}, "max_tokens", "must be an integer, got a string"),
        ({"temperature": float("nan")}, "temperature", "must be a finite number"),
        ({"reasoning": {"max_token": 3}}, "reasoning.max_token", "did you mean max_tokens?"),
        ({"lora": [{"name": "a"}, {"name": "b", "scal": 2}]}, "lora[1].scal", "did you mean scale?"),
        ({"response_format": {"type": "json"}}, "response_format.type", "must be 'json_object' or"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "is required"),
        ({"token_ids": {1, 2}.__iter__()}, "token_ids", "pass plain numbers"),
        ({"prompt": "\ud800"}, "prompt", "surrogates not allowed"),
        ({"seed": 2**70}, "seed", "serialize ints"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_named_with_its_field(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        field_reader.read(fields, messages.GenerateRequest)
    assert caught.value.error.code is errors.Code.INVALID_REQUEST
    assert caught.value.error.param == param
    assert caught.value.error.message.startswith(f"{param}: ")
    assert said in caught.value.error.message


def test_none_is_absent_a_whole_float_is_an_integer_and_messages_of_other_libraries_are_taken() -> None:
    read = field_reader.read(
        {
            "temperature": None,
            "max_tokens": 5.0,
            "stop": ("a",),
            "logit_bias": {5: 1},
            "messages": [{"role": "user", "content": "hi", "refusal": None}],
            "tools": [{"type": "function", "anything": {"goes": None}}],
        },
        messages.GenerateRequest,
    )
    assert (read.temperature, read.max_tokens, read.stop, read.logit_bias) == (None, 5, ["a"], {5: 1.0})
    assert read.messages == [messages.ChatMessage(role="user", content="hi")]
    assert read.tools == [{"type": "function", "anything": {"goes": None}}]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_synchronous_client_has_the_methods_of_the_other_one_with_their_arguments() -> None:
    assert public(SyncClient) == public(Client)
    for name in public(Client) | {"__init__"}:
        ours, theirs = inspect.signature(getattr(SyncClient, name)), inspect.signature(getattr(Client, name))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
        assert inspect.getdoc(getattr(SyncClient, name)), name
    assert public(SyncStream) == public(Stream) - {"aclose"} | {"close"}


def test_the_public_names_are_those_of_the_client_and_each_says_what_it_is() -> None:
    assert tokenbus.__all__ == library.__all__
    for name in tokenbus.__all__:
        assert getattr(tokenbus, name) is getattr(library, name)
        assert inspect.getdoc(getattr(tokenbus, name)), name
    assert issubclass(tokenbus.TokenbusError, tokenbus.RequestError)
