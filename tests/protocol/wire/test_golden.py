"""The exact bytes of every message, checked in: what changes one of them changes the wire."""

import json

import msgspec
import pytest

from tests.protocol.wire import golden
from tokenbus.protocol.wire import internal, messages
from tokenbus.protocol.wire.codec import Decoder, Encoding, encode

FILE: list[golden.Entry] = json.loads(golden.PATH.read_text(encoding="utf-8"))
MESSAGES = {(type(message).__name__, what): message for what, message in (*golden.PUBLIC, *golden.INTERNAL)}


def name_of(entry: golden.Entry) -> str:
    return f"{entry['message']}, {entry['what']}"


def message_of(entry: golden.Entry) -> messages.Message:
    return MESSAGES[entry["message"], entry["what"]]


def subclasses_in(module: object) -> set[str]:
    return {
        kind.__name__
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, messages.Message) and kind is not messages.Message
    }


def test_no_message_of_the_wire_is_without_its_bytes() -> None:
    assert subclasses_in(messages) == {type(message).__name__ for _, message in golden.PUBLIC}
    assert subclasses_in(internal) == {type(message).__name__ for _, message in golden.INTERNAL}


def test_the_file_has_exactly_the_messages_of_the_script() -> None:
    assert len(MESSAGES) == len(golden.PUBLIC) + len(golden.INTERNAL)
    assert [(entry["message"], entry["what"]) for entry in FILE] == list(MESSAGES)


def test_public_messages_have_both_forms_and_internal_ones_are_messagepack() -> None:
    public = subclasses_in(messages)
    assert {entry["message"] for entry in FILE if entry["json"] is not None} == public
    assert {entry["message"] for entry in FILE if entry["json"] is None} == subclasses_in(internal)


@pytest.mark.parametrize("entry", FILE, ids=name_of)
def test_a_message_is_exactly_these_bytes(entry: golden.Entry) -> None:
    message = message_of(entry)
    assert encode(message, Encoding.MSGPACK).hex() == entry["msgpack"]
    if entry["json"] is not None:
        assert encode(message, Encoding.JSON).decode() == entry["json"]


@pytest.mark.parametrize("entry", FILE, ids=name_of)
def test_these_bytes_are_exactly_the_message(entry: golden.Entry) -> None:
    message = message_of(entry)
    decoder = Decoder(type(message))
    assert decoder.decode(bytes.fromhex(entry["msgpack"]), Encoding.MSGPACK) == message
    if entry["json"] is not None:
        assert decoder.decode(entry["json"].encode(), Encoding.JSON) == message


@pytest.mark.parametrize("entry", [entry for entry in FILE if entry["json"] is not None], ids=name_of)
def test_both_forms_have_the_same_names_and_values(entry: golden.Entry) -> None:
    assert entry["json"] is not None
    assert json.loads(entry["json"]) == msgspec.msgpack.decode(bytes.fromhex(entry["msgpack"]))


@pytest.mark.parametrize(
    "message_type", sorted({type(message) for message in MESSAGES.values()}, key=lambda t: t.__name__)
)
def test_every_field_of_a_message_is_in_some_golden_bytes(message_type: type[messages.Message]) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(message_type)}
    seen: set[str] = set()
    for entry in FILE:
        if entry["message"] == message_type.__name__:
            seen |= set(msgspec.msgpack.decode(bytes.fromhex(entry["msgpack"])))
    assert seen == names
