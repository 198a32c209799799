"""Encodes and decodes messages, as JSON or MessagePack; errors name the field at fault."""

import enum
import functools
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, inspect

from tokenbus.protocol.wire import errors, limits, structure

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
"""Anchored at the end: a value or key from the sender could look like a path."""
_MISMATCH = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_ENUM = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_PART = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_NAMES = {
    "array": "an array",
    "bool": "a boolean",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}
_MAX_VALUE = 64
CONTENT_TYPE = "Content-Type"
FREE_FORM = frozenset({"chat_template_kwargs", "tools", "tool_choice", "json_schema", "schema", "tool_calls"})
"""Fields whose values are passed on as they are."""
_LARGEST_EXACT = 2.0**53
_MAX_LENIENT_VALUES = 1 << 19
"""The most members and items, beside those of plain lists and free-form values, of a message that is decoded without
types: to look at so many takes 0.3 s, and at those of 16 MiB ten. What is right has fewer, or needs no leniency."""
_WITHOUT_FLOATS = frozenset((int, str, bytes, bool, type(None), UnsetType))
_PLAIN_TYPES = frozenset((int, str))
_NOT_FINITE_64 = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
_NOT_FINITE_32 = re.compile(rb"\xca[\x7f\xff][\x80-\xff]").search
"""The first bytes of a MessagePack float that may be NaN or infinite. They may also occur in a string, and are
certain to occur where there are many token ids."""


def problem_of(error: msgspec.ValidationError, message_type: Any) -> tuple[str | None, str]:
    """Returns the path of the field at fault, None for the message itself, and a text that begins with it."""
    text = str(error)
    found = _PATH.search(text)
    path, problem = (found[1], text[: found.start()]) if found else ("", text)
    missing = _MISSING.fullmatch(problem)
    if missing:
        path, problem = f"{path}.{missing[1]}".lstrip("."), "is required"
    elif unknown := _UNKNOWN.fullmatch(problem):
        known = ", ".join(_field_names(message_type, path))
        path, problem = f"{path}.{unknown[1][:_MAX_VALUE]}".lstrip("."), f"is not a known field: {known}"
    elif mismatch := _MISMATCH.fullmatch(problem):
        allowed = _choices(message_type, path) or [_NAMES.get(one, one) for one in _alternatives(mismatch[1])]
        problem = f"must be {' or '.join(allowed)}, got {_NAMES.get(mismatch[2], mismatch[2])}"
    elif enum := _ENUM.fullmatch(problem):
        problem = f"must be {' or '.join(_choices(message_type, path))}, got {enum[1][:_MAX_VALUE]}"
    return path or None, f"{path}: {problem}" if path else f"the message {problem}"


def _alternatives(expected: str) -> list[str]:
    """Returns the names of the expected types, without null, which means the same as an absent field."""
    return [one for one in expected.split(" | ") if one != "null"] or ["null"]


def _choices(message_type: Any, path: str) -> list[str]:
    """Returns the values that a field may have if there is a closed set of them."""
    return [repr(value) for one in _types_at(message_type, path) for value in _values(one)]


def _field_names(message_type: Any, path: str) -> list[str]:
    """Returns the names of an object's fields."""
    structs = [one for one in _types_at(message_type, path) if isinstance(one, inspect.StructType)]
    return [field.encode_name for one in structs for field in one.fields]


_type_info = functools.cache(inspect.type_info)
"""To inspect a message's type takes milliseconds, which every wrong message would cost again."""


def _types_at(message_type: Any, path: str) -> list[inspect.Type]:
    """Returns the types that the value at a path may have."""
    nodes = [_type_info(message_type)]
    for part in _PART.findall(path):
        nodes = [child for node in nodes for one in _members(node) for child in _children(one, part)]
    return [one for node in nodes for one in _members(node)]


def _members(node: inspect.Type) -> tuple[inspect.Type, ...]:
    return node.types if isinstance(node, inspect.UnionType) else (node,)


def _children(node: inspect.Type, part: str) -> Iterator[inspect.Type]:
    match node:
        case inspect.StructType():
            yield from (field.type for field in node.fields if field.encode_name == part)
        case inspect.ListType() | inspect.VarTupleType():
            yield node.item_type
        case inspect.DictType():
            yield node.value_type


def _values(node: inspect.Type) -> tuple[object, ...]:
    match node:
        case inspect.LiteralType():
            return tuple(node.values)
        case inspect.EnumType():
            return tuple(one.value for one in node.cls)
    return ()


MessageT = TypeVar("MessageT")
ValueT = TypeVar("ValueT")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every struct that is sent as one NATS message."""


class Encoding(enum.StrEnum):
    JSON = "json"
    MSGPACK = "msgpack"


_JSON = Encoding.JSON
"""Looking up an enumeration member takes about half as long as encoding a chunk."""
_ENCODINGS = {"application/json": Encoding.JSON, "application/msgpack": Encoding.MSGPACK}


class MediaTypeError(ValueError):
    """The content type is neither JSON nor MessagePack."""


def encoding_of(headers: Mapping[str, str] | None) -> Encoding:
    """Returns the encoding that a message's headers declare, JSON by default.

    Raises MediaTypeError for any other content type; answer that in JSON."""
    for name, value in (headers or {}).items():
        if name.lower() == "content-type":
            encoding = _ENCODINGS.get(value.partition(";")[0].strip().lower())
            if encoding is None:
                raise MediaTypeError(f"{value[:100]!r} is not supported: use application/json or application/msgpack")
            return encoding
    return Encoding.JSON


def content_headers(encoding: Encoding) -> dict[str, str] | None:
    """Returns the headers of a request in that encoding, None where it needs none."""
    return {CONTENT_TYPE: "application/msgpack"} if encoding is Encoding.MSGPACK else None


_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct, encoding: Encoding = Encoding.MSGPACK) -> bytes:
    """Encodes a message. Raises UnicodeEncodeError for strings with lone surrogates."""
    return (_json_encoder if encoding is _JSON else _msgpack_encoder).encode(message)


class Decoder(Generic[MessageT]):
    """Decodes one type of message. Make one for each type, once: building a decoder costs ten times a decode."""

    def __init__(self, message_type: type[MessageT], free_form: frozenset[str] = FREE_FORM) -> None:
        """`free_form` are the names of fields whose values are passed on as they are."""
        self._type = message_type
        self._free_form = free_form
        self._json = msgspec.json.Decoder(message_type)
        self._msgpack = msgspec.msgpack.Decoder(message_type)

    def __repr__(self) -> str:
        return f"<Decoder of {self._type.__name__}>"

    def decode(self, payload: bytes, encoding: Encoding = Encoding.MSGPACK) -> MessageT:
        """Decodes a message. Raises RequestError(invalid_request) with the path of the field at fault.

        The strict decoder handles nearly everything. What it refuses is decoded once more without types, so that an
        integral float passes for an int, null for an absent field, and the last of duplicate keys wins."""
        try:
            return self._strict(payload, encoding)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._lenient(payload, encoding)

    def _strict(self, payload: bytes, encoding: Encoding) -> MessageT:
        if encoding is _JSON:
            return self._json.decode(payload)
        message = self._msgpack.decode(payload)
        # JSON has no NaN, MessagePack does. Walking every message would cost more than decoding it: this looks for the
        # few bytes that such a float begins with, and walks only the messages that have them.
        if _NOT_FINITE_64(payload) or _NOT_FINITE_32(payload):
            _check_finite(message)
        return message

    def _lenient(self, payload: bytes, encoding: Encoding) -> MessageT:
        check_structure(payload, encoding)
        try:
            raw = msgspec.json.decode(payload) if encoding is Encoding.JSON else msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _invalid(f"the message is not valid {_LABELS[encoding]}: {error}") from error
        except RecursionError as error:
            raise _invalid("the message is nested too deeply") from error
        try:
            normal = _Normalizer(self._free_form).normalize(raw)
            message = msgspec.convert(normal, self._type, str_keys=encoding is Encoding.JSON)
            _check_finite(message)
            return message
        except msgspec.ValidationError as error:
            path, problem = problem_of(error, self._type)
            raise _invalid(problem, param=path) from error
        except RecursionError as error:  # in a free-form value, which is passed on as it is
            raise _invalid("the message is nested too deeply") from error


def _check_finite(value: Any) -> None:
    """Raises RequestError(invalid_request) if a struct, list or dict has a number in it that is not finite."""
    children: Iterable[Any] = ()
    if isinstance(value, msgspec.Struct):
        children = [getattr(value, name) for name in _fields_with_floats(type(value))]
    elif isinstance(value, dict):
        children = (*value, *value.values())
    elif isinstance(value, (list, tuple)) and not _is_plain(value):
        children = value
    for child in children:
        if type(child) in _WITHOUT_FLOATS:
            continue
        if type(child) is not float:
            _check_finite(child)
        elif not math.isfinite(child):
            raise _invalid("NaN and infinite numbers are not allowed")


@functools.cache
def _fields_with_floats(message_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the fields that may hold a float. Token ids don't: the decoder has seen that they are ints."""
    return tuple(field.name for field in msgspec.structs.fields(message_type) if _may_hold_floats(field.type))


def _may_hold_floats(field_type: Any) -> bool:
    inner = typing.get_args(field_type)
    return any(map(_may_hold_floats, inner)) if inner else field_type not in _WITHOUT_FLOATS


def _is_plain(value: Any) -> bool:
    """Whether a value is a list of integers or strings, which needs no search: a prompt may have millions of ids."""
    return isinstance(value, list) and _PLAIN_TYPES.issuperset(map(type, value))


_LABELS = {Encoding.JSON: "JSON", Encoding.MSGPACK: "MessagePack"}


def check_structure(payload: bytes, encoding: Encoding) -> None:
    """Raises RequestError(invalid_request) for a message of so many lists, objects and strings that decoding it would
    take seconds, and a gibibyte."""
    has_more = structure.json_has_more if encoding is _JSON else structure.msgpack_has_more
    if has_more(payload, limits.MAX_VALUES):
        raise _invalid(f"the message has more than {limits.MAX_VALUES} lists, objects and strings")


def check_nesting(value: object, path: str) -> None:
    """Raises RequestError(invalid_request) for a free-form value that is nested too deeply."""
    if _deeper_than(value, limits.MAX_NESTING):
        raise _invalid(f"{path} is nested deeper than {limits.MAX_NESTING} levels", param=path)


def _deeper_than(value: object, levels: int) -> bool:
    # Only values with children are kept: otherwise a value of megabytes would be copied once for each level.
    level = [value] if value and isinstance(value, (dict, list)) else []
    while level and levels > 1:
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if child and isinstance(child, (dict, list))
        ]
        levels -= 1
    return bool(level)


class _Normalizer:
    """Brings one message that was decoded without types into the form that the strict decoder takes."""

    def __init__(self, free_form: frozenset[str]) -> None:
        self._free_form = free_form
        self._num_left = _MAX_LENIENT_VALUES

    def normalize(self, value: Any, depth: int = 0) -> Any:
        """Raises RequestError(invalid_request) for a value with too many others in it, or that is nested too deeply."""
        if depth > limits.MAX_NESTING:
            raise _invalid(f"the message is nested deeper than {limits.MAX_NESTING} levels")
        if isinstance(value, dict):
            self._count(len(value))
            return {
                # null and 1.0 mean something to templates and tools: they get what the client wrote.
                key: child if key in self._free_form else self.normalize(child, depth + 1)
                for key, child in value.items()
                if child is not None
            }
        if _is_plain(value):
            return value
        if isinstance(value, list):
            self._count(len(value))
            return [self.normalize(child, depth + 1) for child in value]
        # Above 2**53 a float no longer says which integer was meant.
        if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
            return int(value)
        return value

    def _count(self, num_values: int) -> None:
        self._num_left -= num_values
        if self._num_left < 0:
            raise _invalid(f"the message has more than {_MAX_LENIENT_VALUES} values, and not all of the right types")


def _invalid(message: str, param: str | None = None) -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, message, param=param)


def unset_if_none(value: ValueT | None) -> ValueT | UnsetType:
    """Returns UNSET in place of None, so that the field is left out of the message."""
    return UNSET if value is None else value


def error_headers(error: errors.Error) -> dict[str, str]:
    """Returns the headers of an error terminal; ordinary NATS tools show them."""
    info = errors.CODES[error.code]
    return {"Nats-Service-Error-Code": str(info.http), "Nats-Service-Error": f"{error.code}: {error.message}"[:512]}


replace = msgspec.structs.replace
