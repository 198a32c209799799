"""The headers of large messages, which are sent in parts.

announcement   the subject and headers of the message, and `Tokenbus-Size`, but no body
part           `Tokenbus-Offset`, and the bytes from there on
"""

from collections.abc import Mapping

from tokenbus.protocol.wire import errors, limits

SIZE = "Tokenbus-Size"
OFFSET = "Tokenbus-Offset"
_MAX_DIGITS = 12


def part_bytes(max_payload: int) -> int:
    """Returns the size of a part, for a broker that allows `max_payload` bytes in a message."""
    return max(1, min(limits.UPLOAD_PART_BYTES, max_payload - limits.MESSAGE_RESERVE_BYTES))


def is_announcement(headers: Mapping[str, str] | None) -> bool:
    """Whether a message only announces a large one."""
    return headers is not None and SIZE in headers


def size_of(headers: Mapping[str, str] | None) -> int:
    """Returns the size given in an announcement. Raises RequestError(invalid_request)."""
    return _number(headers, SIZE)


def offset_of(headers: Mapping[str, str] | None) -> int:
    """Returns where a part begins. Raises RequestError(invalid_request)."""
    return _number(headers, OFFSET)


def _number(headers: Mapping[str, str] | None, name: str) -> int:
    text = (headers or {}).get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise errors.invalid_field(name, f"must be a number of bytes, got {text[:20]!r}")
    return int(text)
