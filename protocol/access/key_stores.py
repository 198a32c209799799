"""Where keys are kept: in a bucket of the broker, for a whole fleet, or in a file, where there is no JetStream."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import MAX_KEYS
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus.bucket import (
    Bucket,
    BucketConflictError,
    BucketError,
    BucketLateError,
    BucketLimits,
    Entry,
)

if sys.platform != "win32":
    import fcntl

LIMITS = BucketLimits(max_bytes=256 * 1024 * 1024, max_value_bytes=keys.MAX_RECORD_BYTES)
_MAX_FILE_BYTES = 64 * 1024 * 1024
_PRIVATE = 0o600
_OTHERS = 0o077


class KeyStoreError(Exception):
    """The store can't be reached, read or written."""


class KeyConflictError(KeyStoreError):
    """Somebody else has changed the key in the meantime."""


class KeyInDoubtError(KeyStoreError):
    """It is not known whether a new key was stored."""

    def __init__(self, key_id: str, problem: str) -> None:
        super().__init__(problem)
        self.key_id = key_id


class StoredKey(NamedTuple):
    record: KeyRecord
    revision: str
    """Changes with each change of the record."""


class LoadedKeys(NamedTuple):
    records: dict[str, KeyRecord]
    problems: dict[str, str]
    """The reasons for which records can't be used, by their names in the store."""


class KeyStore(Protocol):
    """The keys of a fleet, for those who manage them."""

    async def create(self) -> None:
        """Makes the store, unless it is there. Raises KeyStoreError."""
        ...

    async def load(self) -> LoadedKeys:
        """Raises KeyStoreError."""
        ...

    async def get(self, key_id: str) -> StoredKey | None:
        """Raises KeyStoreError, also for a record that can't be used."""
        ...

    async def add(self, record: KeyRecord) -> None:
        """Raises KeyConflictError if there is a key with this id, KeyInDoubtError, KeyStoreError."""
        ...

    async def replace(self, record: KeyRecord, revision: str) -> None:
        """Replaces a record that has this revision. Raises KeyConflictError, KeyStoreError."""
        ...


class BucketKeys:
    """Keys in a bucket of the broker's JetStream."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def __repr__(self) -> str:
        return f"<BucketKeys {self.bucket!r}>"

    async def create(self) -> None:
        with _failing():
            await self.bucket.create(LIMITS)

    async def load(self) -> LoadedKeys:
        with _failing():
            changes = await self.bucket.changes()
        return loaded(changes.entries)

    async def get(self, key_id: str) -> StoredKey | None:
        with _failing():
            entry = await self.bucket.get(key_id)
            return None if entry is None else StoredKey(record_of(entry), str(entry.revision))

    async def add(self, record: KeyRecord) -> None:
        with _failing():
            try:
                await self.bucket.create_entry(record.id, keys.encode_record(record))
            except BucketLateError as error:
                raise KeyInDoubtError(record.id, str(error)) from error

    async def replace(self, record: KeyRecord, revision: str) -> None:
        with _failing():
            await self.bucket.update(record.id, keys.encode_record(record), int(revision))


def record_of(entry: Entry) -> KeyRecord:
    """Returns the record in an entry of the bucket. Raises ValueError if it is none, or that of another key."""
    if entry.value is None:
        raise ValueError("the key was deleted")
    record = keys.decode_record(entry.value)
    if record.id != entry.key:
        raise ValueError(f"the record is that of the key {record.id}")
    return record


def loaded(entries: list[Entry]) -> LoadedKeys:
    """Returns the records in entries of the bucket; deleted ones are left out."""
    records, problems = {}, {}
    for entry in entries:
        if entry.value is None:
            continue
        try:
            records[entry.key] = record_of(entry)
        except ValueError as error:
            problems[entry.key] = str(error)
    return LoadedKeys(records, problems)


class FileKeys:
    """Keys in a JSON file, which only its owner can read: `{"keys": [...]}`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<FileKeys {self.path}>"

    async def create(self) -> None:
        with _failing(), self._locked():
            if not self.path.exists():
                self._write([])

    async def load(self) -> LoadedKeys:
        return await asyncio.to_thread(self.read)

    def read(self) -> LoadedKeys:
        """Reads the file. Raises KeyStoreError."""
        records, problems = {}, {}
        with _failing():
            for number, value in enumerate(self._values(), 1):
                try:
                    record = keys.decode_record(msgspec.json.encode(value))
                    if record.id in records:
                        raise ValueError(f"the key {record.id} is there twice")
                    records[record.id] = record
                except ValueError as error:
                    problems[f"key {number}"] = str(error)
        return LoadedKeys(records, problems)

    async def get(self, key_id: str) -> StoredKey | None:
        record = (await self.load()).records.get(key_id)
        return None if record is None else StoredKey(record, _revision(record))

    async def add(self, record: KeyRecord) -> None:
        with _failing(), self._locked():
            known = self.read()
            self._check_writable(known)
            if record.id in known.records:
                raise KeyConflictError(f"there is a key with the id {record.id}")
            self._write([*known.records.values(), record])

    async def replace(self, record: KeyRecord, revision: str) -> None:
        with _failing(), self._locked():
            known = self.read()
            self._check_writable(known)
            before = known.records.get(record.id)
            if before is None or _revision(before) != revision:
                raise KeyConflictError("the key was changed in the meantime")
            self._write(list((known.records | {record.id: record}).values()))

    def _check_writable(self, known: LoadedKeys) -> None:
        """Raises KeyStoreError for a file with a record that writing it would lose."""
        for name, problem in known.problems.items():
            raise KeyStoreError(f"{self.path}: {name}: {problem}")

    def _values(self) -> list[object]:
        """Raises OSError, ValueError."""
        with self.path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & _OTHERS:
                raise ValueError(f"{self.path} may be read by others: chmod 600 {self.path}")
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"{self.path} has more than {_MAX_FILE_BYTES} bytes")
        try:
            found = msgspec.json.decode(content)["keys"]
        except (ValueError, KeyError, TypeError, RecursionError):
            found = None
        if not isinstance(found, list):
            raise ValueError(f'{self.path} must be {{"keys": [...]}}')
        if len(found) > MAX_KEYS:
            raise ValueError(f"{self.path} has more than {MAX_KEYS} keys")
        return found

    def _write(self, records: list[KeyRecord]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode({"keys": records}), indent=1) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other writers. The file itself can't be locked, since each write replaces it."""
        if sys.platform == "win32":
            raise KeyStoreError("files with keys can't be changed on Windows, which can't lock them as others do")
        lock = self.path.with_name(f".{self.path.name}.lock")
        with open(os.open(lock, os.O_WRONLY | os.O_CREAT, _PRIVATE), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _revision(record: KeyRecord) -> str:
    return keys.digest_of(keys.encode_record(record).decode())


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Turns the errors of buckets and files into ours."""
    try:
        yield
    except BucketConflictError as error:
        raise KeyConflictError("the key was changed in the meantime") from error
    except BucketError as error:
        raise KeyStoreError(f"the store of keys: {error}") from error
    except OSError as error:
        raise KeyStoreError(f"{error.filename}: {error.strerror or error}") from error
    except ValueError as error:
        raise KeyStoreError(str(error)) from error
