"""Moves blocks over NATS: the reader requests one part after another, with a few requests in flight.

    reader                                             holder
      |-- kv: BlockLeaseRequest (perhaps in parts) ------>|
      |<------------- BlockLease {lease, num_blocks} -----|
      |-- kv.read: BlockRead {block, offset, num_bytes} ->|     up to 8 on their way
      |<------------- BlockPart {data, checksum} ---------|
      |-- kv.read: BlockRead {num_bytes: 0} ------------->|     the lease ends

Both ends use a dedicated connection, so that no chunk, run or heartbeat is queued behind blocks. It is opened for the
first transfer, and closed a minute after the last."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import (
    Bus,
    Callback,
    NoRespondersError,
    OutboundBufferLimitError,
    Outgoing,
)
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.parts.assembly import UploadLimits, part_bytes
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.worker.kv_exchange.checksums import checksums_of
from tokenbus.worker.kv_exchange.holder import MAX_LEASES, GivenBlock, Holder, NoBlock

_leases = codec.Decoder(internal.BlockLease)
_lease_requests = codec.Decoder(internal.BlockLeaseRequest)
_reads = codec.Decoder(internal.BlockRead)
_parts = codec.Decoder(internal.BlockPart)

MAX_OUTSTANDING = 8
"""Parts of one lease that may be in flight."""
ANSWER_S = 1.0
"""A holder that does not answer for this long is given up."""
_AGAIN_S = 0.02
"""A reader that is told to ask again waits this long, whatever the holder does."""
IDLE_S = 60.0
"""The connection is closed when unused for this long."""
_MAX_READS = 2 * MAX_OUTSTANDING * (MAX_LEASES + limits.MAX_REMOTE_PREFILLS)
"""The most open requests of all readers together; honest ones have half as many."""
_MAX_QUESTION_BYTES = 16 * 1024 * 1024
_BYTES_PER_S = 32 * 1024 * 1024
_BURST_S = 0.05

Connect = Callable[[], Awaitable[Bus]]


class TransferError(Exception):
    """Blocks could not be fetched; `outcome` says why: one of the metrics' FETCH_OUTCOMES."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class Pace:
    """Limits how fast blocks move while a worker computes. Times are seconds of one monotonic clock."""

    def __init__(self, bytes_per_s: float = _BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def delay_s(self, num_bytes: int, now: float) -> float:
        """Returns how long to wait before these bytes may move."""
        delay_s = max(0.0, self._free_at - _BURST_S - now)
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        return delay_s


class _Line(NamedTuple):
    """The open connection for blocks."""

    bus: Bus
    sender: PartsSender
    replies: ReplyInbox


class BlockTransport:
    """One worker's two ends: it reads blocks of other workers, and serves those of its `Holder`. It moves bytes and
    checks that they have arrived intact; what they mean is checked by its users."""

    def __init__(
        self,
        incoming: Bus,
        connect: Connect,
        names: subjects.Subjects,
        model: str,
        worker_id: str,
        holder: Holder,
        is_computing: Callable[[], bool],
    ) -> None:
        """`incoming` is the connection on which others' requests arrive, `connect` opens the one for blocks. While the
        worker is computing, the rate of its blocks is limited."""
        self._incoming = incoming
        self._connect = connect
        self._names = names
        self._model = model
        self._holder = holder
        self._is_computing = is_computing
        self._own = partial(names.worker, model, worker_id)
        self._pace = Pace()
        self._line: _Line | None = None
        self._opening: asyncio.Task[_Line] | None = None
        self._is_closed = False
        self._used_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        bounds = UploadLimits(_MAX_QUESTION_BYTES, 4 * _MAX_QUESTION_BYTES, 4 * _MAX_QUESTION_BYTES)
        self._receiver = PartsReceiver(
            incoming, lambda owner, upload_id: self._own(f"kv.upload.{upload_id}"), bounds, self._may_answer
        )
        self.given_bytes = 0
        """Total bytes of blocks read by others."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<BlockTransport {self._line and self._line.replies!r}, {len(self._tasks)} being given>"

    async def open(self, serve: Callable[[str, Callback], None]) -> None:
        """Starts to accept other workers' requests; `serve` takes the name of a service, and what handles it."""
        await self._receiver.open(self._incoming)
        serve("kv", self._question)

    async def close(self) -> None:
        """Closes the connection for blocks; none is opened for those who still read."""
        self._is_closed = True
        self._receiver.stop()
        if self._opening is not None:
            await asyncio.wait([self._opening], timeout=ANSWER_S)
            if self._opening is not None:
                self._opening.cancel()
        await self._disconnect()

    def close_if_idle(self, now: float) -> None:
        """Closes the connection for blocks if it is unused."""
        is_used = self._line is None or self._line.replies.num_waiting or self._tasks or now - self._used_at < IDLE_S
        if not is_used:
            self._start(self._disconnect())

    async def lease(self, worker_id: str, request: internal.BlockLeaseRequest) -> "LeasedBlocks":
        """Asks another worker of the model for blocks. Raises TransferError if it offers none."""
        try:
            line = await self._open()
            subject = self._names.worker(self._model, worker_id, "kv")
            asking = self._ask(line, await line.sender.stage(Outgoing(subject, codec.encode(request))))
            try:
                message = await asyncio.shield(asking)
            except asyncio.CancelledError:  # a lease granted now is given back: a holder has few of them
                asking.add_done_callback(partial(self._give_back, line, worker_id))
                raise
            lease = _leases.decode(message.data)
        except NoRespondersError as error:
            raise TransferError("lost", "that worker does not answer") from error
        except (TimeoutError, ConnectionError, OutboundBufferLimitError, errors.RequestError) as error:
            raise TransferError("lost", str(error)) from error
        if not lease.lease:
            raise TransferError("busy" if lease.busy else "nothing", "that worker has no blocks to give now")
        return LeasedBlocks(self, line, self._names.worker(self._model, worker_id, "kv.read"), lease)

    def _give_back(self, line: _Line, worker_id: str, asked: "asyncio.Future[Msg]") -> None:
        """Ends a lease granted to a request that has been abandoned."""
        if asked.cancelled() or asked.exception() is not None:
            return
        with contextlib.suppress(errors.RequestError):
            if (lease := _leases.decode(asked.result().data)).lease:
                LeasedBlocks(self, line, self._names.worker(self._model, worker_id, "kv.read"), lease).close()

    async def _open(self) -> _Line:
        """Returns the connection for blocks. Raises ConnectionError and TimeoutError if it can't be made."""
        if self._is_closed:
            raise ConnectionError("this worker exchanges no more blocks")
        self._used_at = time.monotonic()
        if self._line is not None:
            return self._line
        if self._opening is None:
            self._opening = tasks.awaited(self._make_connection())
            # those still waiting get its error
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._opening)  # others may wait for it, and a half-open connection can't be closed

    async def _make_connection(self) -> _Line:
        try:
            bus = await self._connect()
            replies = ReplyInbox(bus, lambda token: self._own(f"kv.reply.{token}"))
            try:
                await replies.open()
                await bus.subscribe(self._own("kv.read"), self._read)
                await bus.flush()  # the broker must know the subjects before another worker is told to use them
            except BaseException:
                await bus.close()
                raise
            received = ReplyInbox(bus, lambda number: self._own(f"kv.received.{number}"))
            self._line = _Line(bus, PartsSender(bus, received, timeout_s=ANSWER_S, tries=1), replies)
            return self._line
        finally:
            self._opening = None

    async def _disconnect(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.bus.close()

    def _ask(self, line: _Line, message: Outgoing) -> "asyncio.Future[Msg]":
        """Returns the answer. Its errors are NoRespondersError, TimeoutError and ConnectionError."""
        self._used_at = time.monotonic()
        return line.replies.request(message, ANSWER_S)

    def _question(self, message: Msg) -> None:
        """Handles another worker's request, a large one once all its parts have arrived."""
        if not self._may_answer(message):
            return
        try:
            if not self._receiver.announced(message, "workers", self._question):
                self._start(self._grant(message))
        except errors.RequestError as error:
            self._incoming.publish(message.reply, codec.encode(messages.UploadReply(error=error.error)))

    async def _grant(self, message: Msg) -> None:
        try:
            request = _lease_requests.decode(message.data)
            validation.check_ranges(request)
            if request.computed_for:
                validation.check_key(request.computed_for)
        except errors.RequestError:
            return
        with contextlib.suppress(TimeoutError, ConnectionError, OutboundBufferLimitError):
            line = await self._open()
            lease = await self._holder.grant(request)
            line.bus.publish(message.reply, codec.encode(lease))

    def _read(self, message: Msg) -> None:
        try:
            read = _reads.decode(message.data)
            validation.check_ranges(read)
        except errors.RequestError:
            return
        if not read.num_bytes:
            self._holder.end(read.lease)
        elif len(self._tasks) < _MAX_READS and self._may_answer(message):
            self._start(self._give(read, message.reply))

    async def _give(self, read: internal.BlockRead, reply: str) -> None:
        block = await self._holder.read(read.lease, read.block)
        part = internal.BlockPart(later=block is NoBlock.LATER)
        if isinstance(block, GivenBlock):
            data = block.content[read.offset : read.offset + read.num_bytes]
            part = internal.BlockPart(data=data, checksum=block.checksum)
            if self._is_computing():
                await asyncio.sleep(self._pace.delay_s(len(data), time.monotonic()))
            self.given_bytes += len(data)
        with contextlib.suppress(TimeoutError, ConnectionError, OutboundBufferLimitError, ValueError):
            (await self._open()).bus.publish(reply, codec.encode(part))

    def _may_answer(self, message: Msg) -> bool:
        """Whether the reply subject is one for blocks, of a worker of this model."""
        return self._names.is_kv_reply(message.reply, self._model)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = tasks.background("give blocks", work)  # if it fails, the reader gets no answer and computes
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class LeasedBlocks:
    """Blocks that another worker has promised to serve for as long as they are read."""

    def __init__(self, transport: BlockTransport, line: _Line, subject: str, lease: internal.BlockLease) -> None:
        self.num_blocks = lease.num_blocks
        """The number of readable blocks, from the first one requested."""
        self._transport = transport
        self._line = line
        self._subject = subject
        self._name = lease.lease
        self._turns = asyncio.Semaphore(MAX_OUTSTANDING)

    async def read(self, block: int, num_bytes: int) -> bytes:
        """Returns the content of a block, given its number in the prompt and its exact size. Several may be read
        concurrently. Raises TransferError."""
        step = part_bytes(self._line.bus.max_payload)
        reads = [
            internal.BlockRead(lease=self._name, block=block, offset=at, num_bytes=min(step, num_bytes - at))
            for at in range(0, num_bytes, step)
        ]
        parts = await asyncio.gather(*map(self._read, reads))
        content = b"".join(part.data for part in parts)
        (checksum,) = await checksums_of([content])
        if any(part.checksum != checksum for part in parts):
            raise TransferError("corrupt", "the checksum of a block is wrong")
        return content

    def close(self) -> None:
        """Ends the lease. Nothing may be read afterwards."""
        with contextlib.suppress(ConnectionError, OutboundBufferLimitError):
            self._line.bus.publish(self._subject, codec.encode(internal.BlockRead(lease=self._name)))

    async def _read(self, read: internal.BlockRead) -> internal.BlockPart:
        async with self._turns:
            try:
                part = await self._ask(read)
                while part.later:
                    await asyncio.sleep(_AGAIN_S)
                    part = await self._ask(read)
            except NoRespondersError as error:
                raise TransferError("lost", "the worker that gave the blocks is gone") from error
            except (TimeoutError, ConnectionError, OutboundBufferLimitError, errors.RequestError) as error:
                raise TransferError("lost", str(error)) from error
        if not part.data:
            raise TransferError("evicted", "the worker that gave the blocks has them no more")
        if len(part.data) != read.num_bytes:
            raise TransferError("corrupt", f"{len(part.data)} bytes came where {read.num_bytes} were asked for")
        return part

    async def _ask(self, read: internal.BlockRead) -> internal.BlockPart:
        message = await self._transport._ask(self._line, Outgoing(self._subject, codec.encode(read)))
        return _parts.decode(message.data)
