"""Large messages, which are sent in parts: their headers, and their reassembly within bounds (decision 0052).

    announcement   the subject and headers of the message, and `Tokenbus-Size`, but no body
    part           `Tokenbus-Offset`, and the bytes from there on

    announced --part--> ... --last part--> complete
        |                |
        +----------------+--> failed: a part is out of sequence, memory is short, or the sender has stopped

The last part of a complete upload may arrive again, since its only acknowledgement is the message's own answer. So the
subjects of complete uploads are remembered for a while.

An upload is identified by the subject for its parts, which is unguessable. The size that its owner announced counts
against the owner's share until the upload ends. Received bytes count against the memory shared by all owners: an owner
that announces much and sends nothing uses none of it.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import errors, limits

SIZE = "Tokenbus-Size"
OFFSET = "Tokenbus-Offset"
_MAX_DIGITS = 12
_RETRY_AFTER_MS = 1_000.0


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


ContextT = TypeVar("ContextT")


class UploadLimits(NamedTuple):
    """Limits on the uploads to one receiver."""

    message_bytes: int
    """One message."""
    owner_bytes: int
    """All incomplete messages that one owner has announced, taken together."""
    total_bytes: int
    """The parts received from all owners."""


@dataclasses.dataclass(slots=True, eq=False)
class Upload(Generic[ContextT]):
    """A large message in transit."""

    subject: str
    owner: str
    size: int
    context: ContextT
    """The receiver's data, returned once the message is complete."""
    announced_at: float
    touched_at: float
    """When its last new part arrived."""
    data: bytearray = dataclasses.field(default_factory=bytearray)

    def __repr__(self) -> str:
        return f"<Upload of {self.owner}, {len(self.data)} of {self.size} bytes>"

    @property
    def is_complete(self) -> bool:
        return len(self.data) == self.size


class Uploads(Generic[ContextT]):
    """The uploads to one receiver."""

    def __init__(self, bounds: UploadLimits) -> None:
        self._limits = bounds
        self._uploads: dict[str, Upload[ContextT]] = {}
        self._announced_bytes: Counter[str] = Counter()
        self._num_open: Counter[str] = Counter()
        self._complete: TTLCache[bool] = TTLCache(limits.UPLOAD_IDLE_S, limits.MAX_COMPLETE_UPLOADS)
        self.held_bytes = 0
        """Bytes of the parts held."""

    def __repr__(self) -> str:
        return f"<Uploads {len(self._uploads)}, {self.held_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._uploads)

    def announce(self, subject: str, owner: str, size: int, context: ContextT, now: float) -> None:
        """Makes room for a message whose parts will arrive on `subject`. Raises RequestError if there is none."""
        assert subject not in self._uploads, subject
        most = min(self._limits.message_bytes, self._limits.owner_bytes)
        if size > most:
            raise errors.request_error(
                errors.Code.PAYLOAD_TOO_LARGE, f"the message has {size} bytes; the limit is {most}"
            )
        if size == 0:
            raise errors.request_error(errors.Code.INVALID_REQUEST, "a large message has at least one byte")
        if self._announced_bytes[owner] + size > self._limits.owner_bytes:
            raise _overloaded(f"large messages of {self._announced_bytes[owner]} bytes are on their way already")
        if self._num_open[owner] >= limits.MAX_TENANT_UPLOADS:
            raise _overloaded(f"{limits.MAX_TENANT_UPLOADS} large messages are on their way already")
        self._uploads[subject] = Upload(subject, owner, size, context, now, now)
        self._announced_bytes[owner] += size
        self._num_open[owner] += 1

    def add(self, subject: str, offset: int, part: bytes, now: float) -> Upload[ContextT] | None:
        """Adds a part, and returns its upload. An upload that this completes, or for which this raises, is removed.

        A part received before is ignored; None if its upload was already complete. Raises RequestError: upload_lost for
        an unknown upload or a gap before the part, invalid_request for a part that does not fit, overloaded if memory
        is short."""
        upload = self._uploads.get(subject)
        if upload is None:
            if self._complete.get(subject, now):
                return None
            raise errors.request_error(errors.Code.UPLOAD_LOST)
        end = offset + len(part)
        if end <= len(upload.data):
            return upload
        problem = self._problem(upload, offset, end)
        if problem is not None:
            self.remove(subject)
            raise errors.RequestError(problem)
        upload.data += part
        upload.touched_at = now
        self.held_bytes += len(part)
        if upload.is_complete:
            self.remove(subject)
            self._complete.put(subject, True, now)
        return upload

    def remove(self, subject: str) -> Upload[ContextT] | None:
        """Removes an upload, if it is known."""
        upload = self._uploads.pop(subject, None)
        if upload is not None:
            self.held_bytes -= len(upload.data)
            for counts, count in ((self._announced_bytes, upload.size), (self._num_open, 1)):
                counts[upload.owner] -= count
                if not counts[upload.owner]:
                    del counts[upload.owner]
        return upload

    def expire(self, now: float) -> list[Upload[ContextT]]:
        """Removes the uploads whose sender has stopped or takes too long, and returns them."""
        late = [
            one
            for one in self._uploads.values()
            if now - one.touched_at >= limits.UPLOAD_IDLE_S or now - one.announced_at >= limits.UPLOAD_TTL_S
        ]
        for one in late:
            self.remove(one.subject)
        return late

    def clear(self) -> list[Upload[ContextT]]:
        """Removes all uploads, and returns them."""
        known = list(self._uploads.values())
        for one in known:
            self.remove(one.subject)
        return known

    def check_integrity(self) -> None:
        known = self._uploads.values()
        assert self.held_bytes == sum(len(one.data) for one in known)
        assert all(len(one.data) < one.size for one in known)
        assert self._num_open == Counter(one.owner for one in known)
        assert set(self._announced_bytes) == set(self._num_open)
        for owner, count in self._announced_bytes.items():
            assert count == sum(one.size for one in known if one.owner == owner) <= self._limits.owner_bytes
        assert self.held_bytes <= self._limits.total_bytes

    def _problem(self, upload: Upload[ContextT], offset: int, end: int) -> errors.Error | None:
        """Returns why the upload can't continue with a part from `offset` to `end`."""
        if offset > len(upload.data):
            return errors.make_error(errors.Code.UPLOAD_LOST)
        if offset < len(upload.data) or end > upload.size:
            text = f"bytes {offset} to {end} do not follow the {len(upload.data)} of {upload.size} that have come"
            return errors.make_error(errors.Code.INVALID_REQUEST, text, param="Tokenbus-Offset")
        if self.held_bytes + end - offset > self._limits.total_bytes:
            return _overloaded("no memory is left for large messages").error
        return None


def _overloaded(problem: str) -> errors.RequestError:
    return errors.RequestError(errors.make_error(errors.Code.OVERLOADED, problem, retry_after_ms=_RETRY_AFTER_MS))
