"""The keys that a process knows, by what a store has told it last, and whether they may be used."""

import enum
from collections.abc import Callable, Iterator

from tokenbus.protocol.access import keys
from tokenbus.protocol.access.keys import KeyRecord

MAX_KEYS = 65_536
SILENT_AFTER_S = 5.0
"""A store that has told nothing for so long counts as unreachable."""
DEFAULT_STALE_S = 300.0


class KeyProblem(enum.StrEnum):
    """Why a key is refused."""

    INVALID = "invalid"
    """It is unknown, or its secret is wrong: which of both is not told."""
    NOT_VALID_NOW = "not_valid_now"
    """It is revoked, has expired, or is not valid yet."""
    UNAVAILABLE = "unavailable"
    """The store can't be reached, and the key is unknown, or has not been confirmed for too long."""


class KeyRefusedError(Exception):
    """A key may not be used now; the message says why and shows no secret."""

    def __init__(self, problem: KeyProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class KeyRing:
    """All keys by id. While their store is silent, known ones stay valid for `stale_s`, and unknown ones are refused as
    `unavailable` rather than invalid.

    `now` is Unix time, since validity is; `heard_at` and `clock` are monotonic."""

    def __init__(self, stale_s: float = DEFAULT_STALE_S) -> None:
        self.stale_s = stale_s
        self._records: dict[str, KeyRecord] = {}
        self._heard_at: float | None = None
        self.on_change: list[Callable[[KeyRecord | None, KeyRecord | None], None]] = []
        """Called with a key's record before and after each change; None for one that is not there."""

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._records)}>"

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[KeyRecord]:
        return iter(self._records.values())

    def put(self, record: KeyRecord) -> None:
        """Adds or replaces a record. Raises ValueError if there are too many."""
        before = self._records.get(record.id)
        if before is None and len(self._records) >= MAX_KEYS:
            raise ValueError(f"there are more than {MAX_KEYS} keys")
        self._records[record.id] = record
        if before != record:
            self._changed(before, record)

    def remove(self, key_id: str) -> None:
        before = self._records.pop(key_id, None)
        if before is not None:
            self._changed(before, None)

    def heard(self, clock: float) -> None:
        """Notes that the store has told everything until now."""
        self._heard_at = clock

    def silent_s(self, clock: float) -> float:
        """Returns for how long the store has been silent; infinity if it has never told anything."""
        return float("inf") if self._heard_at is None else clock - self._heard_at

    def is_silent(self, clock: float) -> bool:
        return self.silent_s(clock) > SILENT_AFTER_S

    def find(self, key: str, now: float, clock: float) -> KeyRecord:
        """Returns the record of a whole key. Raises KeyRefusedError."""
        key_id = keys.id_of(key)
        record = None if key_id is None else self._records.get(key_id)
        if key_id is None or (record is None and not self.is_silent(clock)):
            raise _invalid()
        record = self._confirmed(key_id, clock)
        if not record.has_secret(key, now):
            raise _invalid()
        return _valid(record, now)

    def find_by_id(self, key_id: str, now: float, clock: float) -> KeyRecord:
        """Returns the record of a key whose secret somebody else has checked. Raises KeyRefusedError."""
        if key_id not in self._records and not self.is_silent(clock):
            raise _invalid()
        return _valid(self._confirmed(key_id, clock), now)

    def get(self, key_id: str) -> KeyRecord | None:
        return self._records.get(key_id)

    def _confirmed(self, key_id: str, clock: float) -> KeyRecord:
        record = self._records.get(key_id)
        if record is None or (self.is_silent(clock) and self.silent_s(clock) > self.stale_s):
            raise KeyRefusedError(KeyProblem.UNAVAILABLE, "the store of keys can't be reached now: try again later")
        return record

    def _changed(self, before: KeyRecord | None, after: KeyRecord | None) -> None:
        for callback in self.on_change:
            callback(before, after)


def _invalid() -> KeyRefusedError:
    # One error that is raised again and again would keep the frames, and so the keys, of every time.
    return KeyRefusedError(KeyProblem.INVALID, "the API key is invalid")


def _valid(record: KeyRecord, now: float) -> KeyRecord:
    problem = record.problem_at(now)
    if problem is not None:
        raise KeyRefusedError(KeyProblem.NOT_VALID_NOW, f"the API key {record.id} {problem}")
    return record
