"""A bucket of the broker's JetStream: values by key, changed only by whoever knows their last revision.

Its changes are read by revision, with no consumer on the broker that a restart could lose: each put has the next
number of the bucket, and of each key only the last one is there.

A cluster of brokers keeps three copies of a bucket, and makes none before it can; `copies.py` has the rest made of one
that has fewer. Nobody answers for a bucket while the brokers that keep it are away, so that silence never means that
there is no bucket: only the cluster's word does."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors

from tokenbus.protocol.bus import bus
from tokenbus.protocol.bus.connection import CancellationGuard, Connection

_TIMEOUT_S = 2.0
_PAGE = 1_024
_PAGE_BYTES = 4 * 1024 * 1024
"""Entries, and bytes, that the broker sends at a time."""
NUM_COPIES = 3
"""Copies that a cluster of brokers keeps, so that a bucket outlives each of them."""
_BUCKET = "KV_"
"""Begins the names of the streams that are buckets."""
_OPERATION = "KV-Operation"
_WRONG_REVISION = (10071, 10164)
"""The broker's error codes for a put that expected another revision."""
_NO_ROOM = (10023, 10047, 10077)
"""Those for insufficient resources, insufficient storage, and a stream that can't store more."""
_NO_CLUSTER = 10074
"""The one for copies that are asked of a broker that belongs to no cluster."""
_FEW_BROKERS = (10005, 10008, 10118)
"""Those for too few brokers to place all copies, too few for any change, and a stream whose brokers are away."""


class BucketError(Exception):
    """The bucket can't be reached, or did not accept a value."""


class BucketMissingError(BucketError):
    """There is no such bucket, or no JetStream."""


class BucketOfflineError(BucketError):
    """Nobody answers for the bucket now, which may well be there."""


class BucketLateError(BucketOfflineError):
    """No answer has come in time."""


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


class Copies(NamedTuple):
    """The copies of a bucket."""

    num: int
    is_clustered: bool
    """Whether the brokers that keep it are a cluster."""

    @property
    def num_missing(self) -> int:
        return max(0, NUM_COPIES - self.num) if self.is_clustered else 0


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


class _SilentError(BucketError):
    """Nobody is there who could answer."""


async def add_copied(js: JetStreamContext, config: api.StreamConfig) -> api.StreamConfig:
    """Makes a stream with three copies or, where the broker says that it is no cluster, with one; returns how it is
    configured. Raises nats-py's errors, also while a cluster has too few brokers."""
    try:
        return (await js.add_stream(config.evolve(num_replicas=NUM_COPIES))).config
    except js_errors.APIError as error:
        if error.err_code != _NO_CLUSTER:
            raise
        return (await js.add_stream(config.evolve(num_replicas=1))).config


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
        self.stream = stream
        self.name = stream.removeprefix(_BUCKET)
        self._prefix = prefix
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.stream}>"

    @property
    def is_reachable(self) -> bool:
        """Whether the broker is there; what is sent while it is away waits before the answers to clients."""
        return self._connection.is_connected

    async def _create(self, config: api.StreamConfig) -> api.StreamConfig:
        """Makes the stream, unless it is there: then it stays as it is. Returns how it is configured. Raises
        BucketError."""
        names = {"name": self.stream, "subjects": [f"{self._prefix}>"], "allow_direct": True, "deny_delete": True}
        async with self._asking():
            try:
                return (await self._js.stream_info(self.stream)).config
            except js_errors.NotFoundError:
                return await add_copied(self._js, config.evolve(**names))

    async def copies(self) -> Copies:
        """Raises BucketError."""
        return _copies_in(await self._ask("INFO"))

    async def complete_copies(self) -> Copies:
        """Has a cluster make the copies that are missing; returns those that there are. Raises BucketError."""
        reply = await self._ask("INFO")
        if not (copies := _copies_in(reply)).num_missing:
            return copies
        await self._ask("UPDATE", reply["config"] | {"num_replicas": NUM_COPIES})
        return Copies(NUM_COPIES, is_clustered=True)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Turns the errors of nats-py into ours, and silence into what is known of the bucket."""
        try:
            with _failing():
                yield
        except _SilentError as error:
            raise await self._reason_of_silence() from error
        except BucketLateError as error:
            raise self._late() from error

    async def _reason_of_silence(self) -> BucketError:
        """Finds out whether the bucket is there, since nobody answers for it."""
        try:
            with _failing():
                await self._js.stream_info(self.stream)
        except _SilentError:
            return BucketMissingError("the broker has no JetStream")
        except BucketLateError:
            return self._late()
        except BucketError as error:
            return error
        return BucketOfflineError("the bucket is there, but none of its brokers answers for it at the moment")

    def _late(self) -> BucketLateError:
        if self._connection.network == self._connection.broker_id:
            return BucketLateError(f"the broker did not answer within {self._timeout_s:g} s")
        why = "the brokers that keep it, or most of the cluster, are away"
        return BucketLateError(f"the bucket is offline: nobody has answered for {self._timeout_s:g} s, since {why}")

    async def _page(self, first: dict[str, object], keys: str) -> tuple[list[Entry], bool]:
        """Returns the entries from a first one on, and whether they are the last ones."""
        found: list[Entry] = []
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(message: Msg) -> None:
            if ended.done():
                return
            if bus.is_no_responders(message):
                ended.set_exception(_SilentError())
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
            self._connection.publish(f"$JS.API.DIRECT.GET.{self.stream}", json.dumps(asked).encode(), inbox)
            async with asyncio.timeout(self._timeout_s):
                is_complete = await ended
        except _SilentError as error:
            raise await self._reason_of_silence() from error
        except TimeoutError as error:
            raise self._late() from error
        except (ConnectionError, bus.OutboundBufferLimitError) as error:
            raise BucketError(str(error)) from error
        finally:
            await self._connection.unsubscribe(subscription)
        return found, is_complete

    async def _ask(self, what: str, asked: dict[str, object] | None = None) -> dict[str, Any]:
        """Returns the broker's answer to a question about the bucket. Raises BucketError."""
        body = b"" if asked is None else json.dumps(asked).encode()
        async with self._asking():
            reply: dict[str, Any] = json.loads((await self._request(f"$JS.API.STREAM.{what}.{self.stream}", body)).data)
            if "error" in reply:
                raise js_errors.APIError.from_error(reply["error"])
        return reply

    async def _put(self, key: str, value: bytes, headers: dict[str, str] | None) -> int:
        async with self._asking():
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
        super().__init__(connection, f"{_BUCKET}{name}", f"$KV.{name}.", timeout_s)

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
        async with self._asking():
            config = (await self._js.stream_info(self.stream)).config
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
        async with self._asking():
            message = await self._request(f"$JS.API.DIRECT.GET.{self.stream}.{self._prefix}{key}", b"")
        if _status(message) == "404":
            return None
        entry = self._entry(message)
        return None if entry.value is None else entry

    async def create_entry(self, key: str, value: bytes) -> int:
        """Puts a key that must not be there; returns its revision. Raises BucketConflictError, BucketError."""
        try:
            return await self.update(key, value, 0)
        except BucketConflictError:
            async with self._asking():  # a deleted key has a revision too
                message = await self._request(f"$JS.API.DIRECT.GET.{self.stream}.{self._prefix}{key}", b"")
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


def _copies_in(reply: dict[str, Any]) -> Copies:
    """Raises BucketError."""
    try:
        return Copies(int(reply["config"]["num_replicas"]), bool((reply.get("cluster") or {}).get("name")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BucketError(f"the broker's answer is not understood: {error!r}") from error


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
    except js_errors.NotFoundError as error:
        raise BucketMissingError("there is no such bucket") from error
    except (js_errors.NoStreamResponseError, nats.errors.NoRespondersError) as error:
        raise _SilentError from error
    except js_errors.APIError as error:
        if error.code is None:  # nats-py's notice that nothing answers
            raise _SilentError from error
        words = error.description or str(error)
        if error.err_code in _FEW_BROKERS:
            needed = f"a cluster needs {NUM_COPIES} brokers with JetStream to make a bucket, and most of them to use it"
            raise BucketOfflineError(f"too few brokers of the cluster are there ({words}): {needed}") from error
        if error.err_code in _WRONG_REVISION:
            raise BucketConflictError(words) from error
        raise (BucketFullError if error.err_code in _NO_ROOM else BucketError)(words) from error
    except TimeoutError as error:  # nats-py's is one, too
        raise BucketLateError from error
    except (nats.errors.Error, OSError, ValueError) as error:
        raise BucketError(str(error) or type(error).__name__) from error
