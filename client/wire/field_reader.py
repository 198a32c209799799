"""Makes a request of keyword arguments, or says which of them is wrong, as a router would."""

import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tokenbus.protocol.wire import codec, errors, messages

RequestT = TypeVar("RequestT", bound=messages.Message)

_OPEN = (messages.ChatMessage, messages.ContentPart)
"""Structs in which other keys are ignored: people pass on messages that other libraries made."""


def read(fields: Mapping[str, Any], request_type: type[RequestT]) -> RequestT:
    """Returns the request with these fields. None is the same as a field that is absent.

    Raises RequestError(invalid_request), whose `param` is the field at fault, for an unknown field, also inside of
    another one, and for a value of a wrong type."""
    _check_names(fields, request_type, "")
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise errors.invalid_field(name, f"must be a finite number, got {value}")
    try:
        packed = msgspec.msgpack.encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unsendable(fields, error) from error
    decoder: codec.Decoder[RequestT] = _decoder(request_type)
    return decoder.decode(packed, codec.Encoding.MSGPACK)


def unknown_field(name: str, allowed: typing.Iterable[str], path: str = "") -> errors.RequestError:
    """Makes the exception for a field that does not exist, naming the nearest one that does."""
    known = sorted(allowed)
    near = difflib.get_close_matches(name, known, 1, 0.6)
    problem = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(known)}"
    where = f"{path}.{name}" if path else name
    return errors.request_error(errors.Code.INVALID_REQUEST, f"{where}: unknown field; {problem}", param=where)


@functools.cache
def _decoder(request_type: type[RequestT]) -> codec.Decoder[RequestT]:
    return codec.Decoder(request_type)


def _check_names(value: Any, struct: type[msgspec.Struct], path: str) -> None:
    """Raises RequestError for a key that is no field of the struct."""
    inner = _structs_in(struct)
    for name, child in value.items():
        if name not in struct.__struct_fields__:
            raise unknown_field(str(name), struct.__struct_fields__, path)
        if name in inner:
            where = f"{path}.{name}" if path else name
            if isinstance(child, Mapping):
                _check_names(child, inner[name], where)
            elif isinstance(child, list | tuple):
                for place, item in enumerate(child):
                    if isinstance(item, Mapping):
                        _check_names(item, inner[name], f"{where}[{place}]")


@functools.cache
def _structs_in(struct: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct]]:
    """Returns the closed structs, or lists of them, that a struct's fields hold, by field."""
    found = {field.name: _struct_in(field.type) for field in msgspec.structs.fields(struct)}
    return types.MappingProxyType({name: one for name, one in found.items() if one and one not in _OPEN})


def _struct_in(field_type: Any) -> type[msgspec.Struct] | None:
    if isinstance(field_type, type) and issubclass(field_type, msgspec.Struct):
        return field_type
    return next(filter(None, map(_struct_in, typing.get_args(field_type))), None)


def _unsendable(fields: Mapping[str, Any], error: Exception) -> errors.RequestError:
    """Makes the exception for a value that no message can hold, such as an array of another library."""
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as problem:
            return errors.invalid_field(name, f"{problem} (pass plain numbers, strings, lists and dictionaries)")
    return errors.request_error(errors.Code.INVALID_REQUEST, str(error))
