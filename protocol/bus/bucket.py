"""A bucket of the broker's JetStream: values by key, changed only by whoever knows their last revision.

Its changes are read by revision, with no consumer on the broker that a restart could lose: each put has the next
number of the bucket, and of each key only the last one is there."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import nats.errors
from nats.aio.msg import Msg
from nats.js import api
from nats.js import errors as js_errors

from tokenbus.protocol.bus import bus
from tokenbus.protocol.bus.connection import CancellationGuard, Connection

_TIMEOUT_S = 2.0
_PAGE = 1_024
_PAGE_BYTES = 4 * 1024 * 1024
"""Entries, and bytes, that the broker sends at a time."""
_NUM_REPLICAS = 3
_OPERATION = "KV-Operation"
_WRONG_REVISION = (10071, 10164)
"""The broker's error codes for a put that expected another revision."""
_NO_ROOM = (10023, 10047, 10077)
"""Those for insufficient resources, insufficient storage, and a stream that can't store more."""


class BucketError(Exception):
    """The bucket can't be reached, or did not accept a value."""


class BucketMissingError(BucketError):
    """There is no such bucket, or no JetStream."""


class BucketConflictError(BucketError):
    """The key was changed in the meantime: it has another revision than expected."""


class BucketFullError(BucketError):
    """The broker has no room for the value."""


class Entry(NamedTuple):
    key: str
    value: bytes | None
    """None if the key was deleted."""
    revision: int
    written_at: str
    """When the broker stored it, by its own clock: RFC 3339, in UTC."""


class BucketState(NamedTuple):
    created: str
    """When the bucket was made: another one of the same name has another time."""
    last_revision: int


class Changes(NamedTuple):
    entries: list[Entry]
    """In the order of their revisions."""
    last_revision: int
    """The revision up to which they are complete."""


class BucketLimits(NamedTuple):
    max_bytes: int
    max_age_s: float = 0.0
    """Seconds after which an entry is dropped; 0: none is."""
    max_value_bytes: int = 64 * 1024


def bucket_name(prefix: str, what: str) -> str:
    """Returns the name of a bucket of the system with a subject prefix."""
    return f"{prefix.replace('.', '_')}_{what}"


class StreamContents:
    """The messages in a stream of the broker, over a connection of this process. The key of each is the rest of its
    subject after a prefix."""

    def __init__(self, connection: Connection, stream: str, prefix: str, timeout_s: float = _TIMEOUT_S) -> None:
        """`prefix` ends with a dot; `timeout_s` is the time for one answer of the broker."""
        self._connection = connection
        self._js = connection.jetstream(timeout_s)
        self._stream = stream
        self._prefix = prefix
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._stream}>"

    @property
    def is_reachable(self) -> bool:
        """Whether the broker is there; what is sent while it is away waits before the answers to clients."""
        return self._connection.is_connected

    async def _create(self, config: api.StreamConfig) -> api.StreamConfig:
        """Makes the stream, unless it is there: then it stays as it is. A cluster that can keeps three copies of it, so
        that it outlives each of its brokers. Returns how it is configured. Raises BucketError."""
        names = {"name": self._stream, "subjects": [f"{self._prefix}>"], "allow_direct": True, "deny_delete": True}
        try:
            return await self._create_copies(config.evolve(**names, num_replicas=_NUM_REPLICAS))
        except BucketError:
            return await self._create_copies(config.evolve(**names, num_replicas=1))

    async def _create_copies(self, config: api.StreamConfig) -> api.StreamConfig:
        with _failing():
            try:
                return (await self._js.stream_info(self._stream)).config
            except js_errors.NotFoundError:
                return (await self._js.add_stream(config)).config

    async def _page(self, first: dict[str, object], keys: str) -> tuple[list[Entry], bool]:
        """Returns the entries from a first one on, and whether they are the last ones."""
        found: list[Entry] = []
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(message: Msg) -> None:
            if ended.done():
                return
            if bus.is_no_responders(message):
                ended.set_exception(BucketMissingError("there is no such bucket, or no JetStream"))
            elif (status := _status(message)) in ("404", "204"):  # no entry, or no further one
                ended.set_result(status == "404" or _header(message, "Nats-Num-Pending") in ("", "0"))
            elif status:
                words = _header(message, "Description") or status
                ended.set_exception(BucketError(f"the broker refuses to list a bucket: {words}"))
            else:
                try:
                    found.append(self._entry(message))
                except BucketError as error:
                    ended.set_exception(error)

        inbox = f"{self._connection.new_inbox()}.{secrets.token_hex(4)}"
        asked = first | {"next_by_subj": f"{self._prefix}{keys}", "batch": _PAGE, "max_bytes": _PAGE_BYTES}
        subscription = await self._connection.subscribe(inbox, take)
        try:
            self._connection.publish(f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(asked).encode(), inbox)
            async with asyncio.timeout(self._timeout_s):
                is_complete = await ended
        except (TimeoutError, ConnectionError, bus.OutboundBufferLimitError) as error:
            raise BucketError(str(error) or "the broker did not answer") from error
        finally:
            await self._connection.unsubscribe(subscription)
        return found, is_complete

    async def _ask(self, what: str, asked: dict[str, object] | None = None) -> dict[str, Any]:
        """Returns the broker's answer to a question about the bucket. Raises BucketError."""
        body = b"" if asked is None else json.dumps(asked).encode()
        with _failing():
            reply: dict[str, Any] = json.loads(
                (await self._request(f"$JS.API.STREAM.{what}.{self._stream}", body)).data
            )
            if "error" in reply:
                raise js_errors.APIError.from_error(reply["error"])
        return reply

    async def _put(self, key: str, value: bytes, headers: dict[str, str] | None) -> int:
        with _failing():
            return (await self._js.publish(f"{self._prefix}{key}", value, headers=headers)).seq

    async def _request(self, subject: str, payload: bytes) -> Msg:
        return await self._js._nc.request(subject, payload, timeout=self._timeout_s)

    def _entry(self, message: Msg) -> Entry:
        """Raises BucketError for what is no stored entry."""
        subject, revision = _header(message, "Nats-Subject"), _header(message, "Nats-Sequence")
        if not subject.startswith(self._prefix) or not revision.isdigit():
            raise BucketError(f"the broker's answer is not understood: {_status(message) or subject[:100]!r}")
        is_deleted = _header(message, _OPERATION) in ("DEL", "PURGE")
        key = subject.removeprefix(self._prefix)
        return Entry(key, None if is_deleted else message.data, int(revision), _header(message, "Nats-Time-Stamp"))


class Bucket(StreamContents):
    """One bucket."""

    def __init__(self, connection: Connection, name: str, timeout_s: float = _TIMEOUT_S) -> None:
        """`timeout_s` is the time for one answer of the broker."""
        super().__init__(connection, f"KV_{name}", f"$KV.{name}.", timeout_s)
        self.name = name

    async def create(self, limits: BucketLimits) -> None:
        """Makes the bucket, unless it is there: then it stays as it is. Raises BucketError."""
        config = api.StreamConfig(
            allow_rollup_hdrs=True,
            discard=api.DiscardPolicy.NEW,
            max_age=limits.max_age_s,
            max_bytes=limits.max_bytes,
            max_msg_size=limits.max_value_bytes,
            max_msgs_per_subject=1,
        )
        await self._create(config)

    async def set_max_age(self, max_age_s: float) -> None:
        """Changes after which time entries are dropped, if that is another. Raises BucketError."""
        with _failing():
            config = (await self._js.stream_info(self._stream)).config
            if config.max_age != max_age_s:
                await self._js.update_stream(config, max_age=max_age_s)

    async def broker_time(self) -> str:
        """Returns the broker's time, in the form of `Entry.written_at`. Raises BucketError."""
        reply = await self._ask("INFO")
        return str(reply.get("ts", ""))  # brokers of earlier versions do not tell it

    async def state(self) -> BucketState:
        """Raises BucketError."""
        reply = await self._ask("INFO")
        try:
            return BucketState(str(reply["created"]), int(reply["state"]["last_seq"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BucketError(f"the broker's answer is not understood: {error!r}") from error

    async def get(self, key: str) -> Entry | None:
        """Returns a key's entry, or None if it has none or was deleted. Raises BucketError."""
        with _failing():
            message = await self._request(f"$JS.API.DIRECT.GET.{self._stream}.{self._prefix}{key}", b"")
        if _status(message) == "404":
            return None
        entry = self._entry(message)
        return None if entry.value is None else entry

    async def create_entry(self, key: str, value: bytes) -> int:
        """Puts a key that must not be there; returns its revision. Raises BucketConflictError, BucketError."""
        try:
            return await self.update(key, value, 0)
        except BucketConflictError:
            with _failing():  # a deleted key has a revision too
                message = await self._request(f"$JS.API.DIRECT.GET.{self._stream}.{self._prefix}{key}", b"")
            if _status(message) == "404" or (deleted := self._entry(message)).value is not None:
                raise
            return await self.update(key, value, deleted.revision)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Puts a key that has this revision (0: none); returns its new one. Raises BucketConflictError, BucketError."""
        return await self._put(key, value, {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)})

    async def put(self, key: str, value: bytes) -> int:
        """Puts a key that only this process writes; returns its revision. Raises BucketError."""
        return await self._put(key, value, None)

    async def delete(self, key: str, revision: int) -> None:
        """Deletes a key that has this revision. Raises BucketConflictError, BucketError."""
        headers = {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision), _OPERATION: "DEL"}
        await self._put(key, b"", headers)

    async def purge(self, key: str, revision: int) -> None:
        """Removes a key without a trace, unless it has a later revision. Raises BucketError."""
        await self._ask("PURGE", {"filter": f"{self._prefix}{key}", "seq": revision + 1})

    async def changes(self, after: int = 0, keys: str = ">") -> Changes:
        """Returns all entries with a higher revision whose keys match a pattern. Raises BucketError."""
        entries: list[Entry] = []
        while True:
            found, is_complete = await self._page({"seq": (entries[-1].revision if entries else after) + 1}, keys)
            entries += found
            if is_complete:
                return Changes(entries, entries[-1].revision if entries else after)


def _header(message: Msg, name: str) -> str:
    return (message.headers or {}).get(name, "")


def _status(message: Msg) -> str:
    return _header(message, "Status")


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Turns the errors of nats-py into ours."""
    try:
        with CancellationGuard():
            yield
    except (js_errors.NotFoundError, js_errors.NoStreamResponseError, nats.errors.NoRespondersError) as error:
        raise BucketMissingError("there is no such bucket, or no JetStream") from error
    except js_errors.APIError as error:
        if error.code is None:  # nats-py's notice that nothing answers
            raise BucketMissingError("there is no such bucket, or no JetStream") from error
        words = error.description or str(error)
        if error.err_code in _WRONG_REVISION:
            raise BucketConflictError(words) from error
        raise (BucketFullError if error.err_code in _NO_ROOM else BucketError)(words) from error
    except (nats.errors.Error, TimeoutError, OSError, ValueError) as error:
        raise BucketError(str(error) or type(error).__name__) from error
