"""Serves this worker's KV blocks to others, which read them under a lease.

A worker may also ask for a prompt to be computed here, and read its blocks meanwhile. Such a remote prefill is a
request to this worker's engine like any other, for a single token that is discarded: what remains is the prompt in the
cache. It ends with its lease."""

import asyncio
import dataclasses
import enum
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from tokenbus.protocol import tasks
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages
from tokenbus.protocol.wire.block_hash import TOKEN_BYTES, Adapter
from tokenbus.worker.broker.replica_state import Serving
from tokenbus.worker.contract import contract, engine_output
from tokenbus.worker.contract.contract import CachedPrefix
from tokenbus.worker.contract.engine_request import EngineRequest, Sampling
from tokenbus.worker.kv_exchange.checksums import checksums_of


class RemotePrefill:
    """One prompt whose blocks are all computed here."""

    def __init__(self, request_id: str, prefix: contract.CachedPrefix, block_size: int) -> None:
        self.request_id = request_id
        """The key of the request whose prompt it is."""
        self.num_tokens = len(prefix.token_ids) // TOKEN_BYTES
        self.num_computed = 0
        """Leading tokens computed so far."""
        self.outcome = ""
        """`complete`, or what ended it early: `cancelled` or `failed`; empty until it ends."""
        self.began_at = time.monotonic()
        self.on_ended: Callable[[RemotePrefill], None] = lambda remote_prefill: None
        self._prefix = prefix
        self._block_size = block_size
        self._abort: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<RemotePrefill for {self.request_id}: {self.num_computed} of {self.num_tokens} tokens {self.outcome}>"

    def start(self, engine: contract.Engine, key: str, priority: int) -> None:
        """Starts it on an engine. Raises RequestError if the engine does not accept it."""
        prefix = self._prefix
        request = EngineRequest(
            key=key,
            token_ids=block_hash.unpack_token_ids(prefix.token_ids),
            sampling=Sampling(max_tokens=1),
            tenant=prefix.tenant,
            cache_salt=prefix.cache_salt,
            adapters=prefix.adapters,
            priority=priority,
            return_progress=True,
        )
        engine.generate(request, self._take)
        self._abort = lambda: engine.abort(key)

    def stop(self) -> None:
        """Ends it, if it has not ended. Computed blocks stay cached."""
        if not self.outcome:
            self._abort()

    def has(self, end: int) -> bool:
        """Whether all blocks before block `end` are computed, or will never be."""
        return bool(self.outcome) or self.num_computed >= end * self._block_size

    async def wait_for(self, end: int) -> None:
        """Returns when `has` would return True."""
        while not self.has(end):
            await self._changed.wait()

    def _take(self, output: engine_output.Output) -> None:
        if output.progress is not None:
            self.num_computed = max(self.num_computed, output.progress.processed_tokens)
        if output.finish_reason is not None:
            self._end(output.finish_reason)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _end(self, reason: messages.FinishReason) -> None:
        match reason:
            case messages.FinishReason.CANCELLED:
                self.outcome = "cancelled"
            case messages.FinishReason.ERROR:
                self.outcome = "failed"
            case _:
                self.outcome, self.num_computed = "complete", self.num_tokens
        self.on_ended(self)


MAX_LEASES = 2
LEASE_S = 10.0
"""A lease ends when nothing has been read for this long."""
UNREAD_S = 2.0
"""The same before the first read: its reader may never have heard of it."""
REMOTE_PREFILL_LEASE_S = 2.0
"""The same for a remote prefill: its reader asks several times a second, and its result is of no use to others."""


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """Blocks `first` to `end` of a prefix, readable by one other worker."""

    name: str
    prefix: CachedPrefix
    first: int
    end: int
    is_remote_prefill: bool
    """Whether this worker computes its blocks."""
    used_at: float
    limit_s: float
    """The time without a read after which it ends."""


class Leases:
    """The leases granted by a worker. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __repr__(self) -> str:
        return f"<Leases {len(self)} of {MAX_LEASES} and {limits.MAX_REMOTE_PREFILLS}>"

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, name: str) -> bool:
        return name in self._leases

    def num_free(self, *, is_remote_prefill: bool) -> int:
        """Returns how many more leases of a kind may be granted."""
        most = limits.MAX_REMOTE_PREFILLS if is_remote_prefill else MAX_LEASES
        return most - sum(one.is_remote_prefill is is_remote_prefill for one in self._leases.values())

    def grant(
        self, prefix: CachedPrefix, first: int, end: int, now: float, *, is_remote_prefill: bool = False
    ) -> Lease:
        """Grants a lease with an unguessable name."""
        assert self.num_free(is_remote_prefill=is_remote_prefill) > 0, self
        limit_s = REMOTE_PREFILL_LEASE_S if is_remote_prefill else UNREAD_S
        lease = Lease(secrets.token_hex(16), prefix, first, end, is_remote_prefill, now, limit_s)
        self._leases[lease.name] = lease
        return lease

    def use(self, name: str, now: float) -> Lease | None:
        """Returns a lease that has not ended, and extends it."""
        self.expire(now)
        lease = self._leases.get(name)
        if lease is not None:
            lease.used_at = now
            lease.limit_s = REMOTE_PREFILL_LEASE_S if lease.is_remote_prefill else LEASE_S
        return lease

    def end(self, name: str) -> None:
        """Ends a lease, if there is one with that name."""
        self._leases.pop(name, None)

    def expire(self, now: float) -> None:
        """Ends unused leases."""
        self._leases = {name: one for name, one in self._leases.items() if now - one.used_at < one.limit_s}


_BATCH_BYTES = 1024 * 1024
"""Bytes requested from the engine at a time; it answers between two steps."""
_REMOTE_PREFILL_BATCH_BLOCKS = 8
_BATCHES_AHEAD = 4
"""Batches requested before they are read, so that a reader seldom waits for a step."""
_MAX_BATCHES = 16
"""The most batches of a lease that are requested or kept. A reader has up to eight blocks in flight."""
_PATIENCE_S = 0.25
"""A reader that waits this long for a block is told to ask again, which shows that this worker is alive."""


class GivenBlock(NamedTuple):
    """A block as it is given."""

    content: bytes
    checksum: int


class NoBlock(enum.Enum):
    """Why a holder does not return a block."""

    GONE = enum.auto()
    """It no longer has the block, or never had it."""
    LATER = enum.auto()
    """It does not have the block yet."""


class _OpenLease:
    """The blocks of a lease, as they arrive from the engine in batches."""

    def __init__(self, lease: Lease, serving: Serving, remote_prefill: RemotePrefill | None = None) -> None:
        """`remote_prefill` computes the blocks of the lease if they do not exist already."""
        config = serving.config
        assert config.kv_format is not None
        self.remote_prefill = remote_prefill
        self._lease = lease
        self._engine = serving.engine
        self._block_bytes = TOKEN_BYTES * config.kv_block_size
        self._batch_size = max(1, _BATCH_BYTES // config.kv_format.num_bytes)
        if remote_prefill is not None:  # a batch can be read once it is fully computed
            self._batch_size = min(self._batch_size, _REMOTE_PREFILL_BATCH_BLOCKS)
        self._batches: dict[int, asyncio.Task[list[GivenBlock]]] = {}

    async def read(self, block: int) -> GivenBlock | NoBlock:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._read(block)
        except TimeoutError:
            return NoBlock.LATER

    async def _read(self, block: int) -> GivenBlock | NoBlock:
        number, place = divmod(block - self._lease.first, self._batch_size)
        if self.remote_prefill is not None:
            await self.remote_prefill.wait_for(self._end(number))
        # a reader has at most a few blocks in flight, so anything far away has been read, or is read later
        near = range(number - _BATCHES_AHEAD, number + _BATCHES_AHEAD)
        self._batches = {at: batch for at, batch in self._batches.items() if at in near or not batch.done()}
        for ahead in range(number, number + _BATCHES_AHEAD):
            is_wanted = ahead not in self._batches and self._start(ahead) < self._lease.end and self._is_there(ahead)
            if is_wanted and len(self._batches) < _MAX_BATCHES:
                self._batches[ahead] = tasks.awaited(self._export(ahead))
        if (batch := self._batches.get(number)) is None:  # what was asked for before it comes first
            return NoBlock.LATER
        blocks = await asyncio.shield(batch)
        return blocks[place] if place < len(blocks) else NoBlock.GONE

    def _start(self, number: int) -> int:
        return self._lease.first + number * self._batch_size

    def _end(self, number: int) -> int:
        return min(self._start(number + 1), self._lease.end)

    def _is_there(self, number: int) -> bool:
        return self.remote_prefill is None or self.remote_prefill.has(self._end(number))

    async def _export(self, number: int) -> list[GivenBlock]:
        start = self._start(number)
        count = self._end(number) - start
        prefix = self._lease.prefix
        needed = codec.replace(prefix, token_ids=prefix.token_ids[: self._block_bytes * (start + count)])
        try:
            is_last = start + count == self._lease.end
            _, blocks = await self._engine.export_blocks(needed, start, count, is_last=is_last)
        except errors.RequestError:  # the engine has died
            return []
        return list(map(GivenBlock, blocks, await checksums_of(blocks)))


class Holder:
    """The blocks that one worker serves."""

    def __init__(self, has_epoch: Callable[[str], bool]) -> None:
        """`has_epoch` says whether an epoch is this worker's current one."""
        self.on_remote_prefill: Callable[[RemotePrefill], None] = lambda remote_prefill: None
        """Called with a remote prefill that the engine has accepted, and again when the remote prefill has ended."""
        self._has_epoch = has_epoch
        self._leases = Leases()
        self._open: dict[str, _OpenLease] = {}
        self._serving: Serving | None = None
        self._granting = 0
        self.none_leased = asyncio.Event()
        """Set while no other worker reads blocks; after a lease expires, from the next tick on."""
        self.none_leased.set()

    def __repr__(self) -> str:
        return f"<Holder {self._leases!r}>"

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def engine_changed(self, serving: Serving | None) -> None:
        """Serves the blocks of another engine, or none. Existing leases end."""
        self._serving = serving
        for name in list(self._open):
            self.end(name)

    async def grant(self, request: internal.BlockLeaseRequest) -> internal.BlockLease:
        """Answers another worker's request for blocks."""
        serving = self._serving
        if serving is None or not _may_read(request, serving.config) or not self._has_epoch(request.epoch):
            return internal.BlockLease()
        self.tick(time.monotonic())
        adapters = tuple(Adapter(one.digest, one.scale) for one in request.adapters)
        prefix = contract.CachedPrefix(request.tenant, request.cache_salt, adapters, request.token_ids)
        if request.computed_for:
            return self._start_remote_prefill(request, prefix, serving)
        if self._leases.num_free(is_remote_prefill=False) <= self._granting:
            return internal.BlockLease(busy=True)
        self._granting += 1
        try:
            num_cached, _ = await serving.engine.export_blocks(prefix, request.first, 0)
        except errors.RequestError:
            return internal.BlockLease()
        finally:
            self._granting -= 1
        if num_cached <= request.first or self._serving is not serving:
            return internal.BlockLease()
        lease = self._leases.grant(prefix, request.first, num_cached, time.monotonic())
        self._open[lease.name] = _OpenLease(lease, serving)
        self.none_leased.clear()
        return internal.BlockLease(lease=lease.name, num_blocks=num_cached - request.first)

    def _start_remote_prefill(
        self, request: internal.BlockLeaseRequest, prefix: contract.CachedPrefix, serving: Serving
    ) -> internal.BlockLease:
        """Makes the engine compute a prompt, whose blocks may be read as they are finished."""
        engine, config = serving
        end = min(len(prefix.token_ids) // TOKEN_BYTES, config.context_length - 1) // config.kv_block_size
        prefix = codec.replace(prefix, token_ids=prefix.token_ids[: TOKEN_BYTES * config.kv_block_size * end])
        if end <= request.first:
            return internal.BlockLease()
        if not self._leases.num_free(is_remote_prefill=True):
            return internal.BlockLease(busy=True)
        remote_prefill = RemotePrefill(request.computed_for, prefix, config.kv_block_size)
        lease = self._leases.grant(prefix, request.first, end, time.monotonic(), is_remote_prefill=True)
        try:
            remote_prefill.start(engine, lease.name, request.priority)
        except errors.RequestError as error:
            self._leases.end(lease.name)
            return internal.BlockLease(busy=error.error.code is errors.Code.OVERLOADED)
        remote_prefill.on_ended = self.on_remote_prefill
        self._open[lease.name] = _OpenLease(lease, serving, remote_prefill)
        self.none_leased.clear()
        self.on_remote_prefill(remote_prefill)
        return internal.BlockLease(lease=lease.name, num_blocks=end - request.first)

    async def read(self, lease: str, block: int) -> GivenBlock | NoBlock:
        """Returns a block, given its number in the prompt. It does not wait long for one."""
        now = time.monotonic()
        self.tick(now)
        known = self._leases.use(lease, now)
        if known is None or not known.first <= block < known.end:
            return NoBlock.GONE
        return await self._open[lease].read(block)

    def end(self, lease: str) -> None:
        """Ends a lease, if it has not ended."""
        self._leases.end(lease)
        self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Ends unused leases, and the remote prefills of those that have ended."""
        self._leases.expire(now)
        for name in [one for one in self._open if one not in self._leases]:
            remote_prefill = self._open.pop(name).remote_prefill
            if remote_prefill is not None:
                # not now: a dying engine has yet to be examined for the request that killed it
                asyncio.get_running_loop().call_soon(remote_prefill.stop)
        if not self._open:
            self.none_leased.set()


def _may_read(request: internal.BlockLeaseRequest, config: contract.EngineConfig) -> bool:
    if not config.kv_identity or request.identity != config.kv_identity:
        return False
    if len(request.adapters) > limits.MAX_ADAPTERS:
        return False
    return (
        0 < len(request.token_ids) <= TOKEN_BYTES * config.context_length and not len(request.token_ids) % TOKEN_BYTES
    )
