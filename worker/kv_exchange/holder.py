"""Gives the KV blocks of this worker to others, which read them under a lease."""

import asyncio
import time
from collections.abc import Callable

from tokenbus.protocol.wire import codec, errors, internal, limits
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker import contract
from tokenbus.worker.kv_exchange.leases import MAX_LEASES, Lease, Leases

_TOKEN_BYTES = 4
_BATCH_BYTES = 1024 * 1024
"""Bytes that the engine is asked for at a time; it answers between two steps."""
_BATCHES_AHEAD = 4
"""Batches that are asked for before they are read, so that a reader seldom waits for a step."""


class _OpenLease:
    """The blocks of a lease, as they come from the engine in batches."""

    def __init__(self, lease: Lease, engine: contract.Engine, config: contract.EngineConfig) -> None:
        assert config.kv_format is not None
        self._lease = lease
        self._engine = engine
        self._block_bytes = _TOKEN_BYTES * config.kv_block_size
        self._batch_size = max(1, _BATCH_BYTES // config.kv_format.num_bytes)
        self._batches: dict[int, asyncio.Task[list[bytes]]] = {}

    async def read(self, block: int) -> bytes | None:
        """Returns the content of a block; None if the engine has it no more."""
        number, place = divmod(block - self._lease.first, self._batch_size)
        for ahead in range(number, number + _BATCHES_AHEAD):
            if ahead not in self._batches and self._start(ahead) < self._lease.end:
                self._batches[ahead] = asyncio.create_task(self._export(ahead))
        # a reader has at most a few blocks on their way, so what is far behind was read
        for old in [one for one in self._batches if one < number - _BATCHES_AHEAD]:
            del self._batches[old]
        if (batch := self._batches.get(number)) is None:
            return None
        blocks = await asyncio.shield(batch)
        return blocks[place] if place < len(blocks) else None

    def _start(self, number: int) -> int:
        return self._lease.first + number * self._batch_size

    async def _export(self, number: int) -> list[bytes]:
        start = self._start(number)
        count = min(self._batch_size, self._lease.end - start)
        prefix = self._lease.prefix
        needed = codec.replace(prefix, token_ids=prefix.token_ids[: self._block_bytes * (start + count)])
        try:
            is_last = start + count == self._lease.end
            _, blocks = await self._engine.export_blocks(needed, start, count, is_last=is_last)
        except errors.RequestError:  # the engine has died
            return []
        return blocks


class Holder:
    """The blocks that one worker gives."""

    def __init__(self, has_epoch: Callable[[str], bool]) -> None:
        """`has_epoch` says whether an epoch is this worker's present one."""
        self._has_epoch = has_epoch
        self._leases = Leases()
        self._open: dict[str, _OpenLease] = {}
        self._engine: contract.Engine | None = None
        self._config: contract.EngineConfig | None = None
        self._granting = 0
        self.none_leased = asyncio.Event()
        """Set while nobody reads blocks; after a lease that expires, from the next tick on."""
        self.none_leased.set()

    def __repr__(self) -> str:
        return f"<Holder {self._leases!r}>"

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def set_engine(self, engine: contract.Engine | None, config: contract.EngineConfig | None) -> None:
        """Sets the engine whose blocks are given; None while there is none. What was leased before is gone."""
        self._engine, self._config = engine, config
        for name in self._leases.names():
            self.end(name)

    async def grant(self, request: internal.BlockLeaseRequest) -> internal.BlockLease:
        engine, config, now = self._engine, self._config, time.monotonic()
        if engine is None or config is None or not _may_read(request, config) or not self._has_epoch(request.epoch):
            return internal.BlockLease()
        self._leases.expire(now)
        if len(self._leases) + self._granting >= MAX_LEASES:
            return internal.BlockLease(busy=True)
        adapters = tuple(Adapter(one.digest, one.scale) for one in request.adapters)
        prefix = contract.CachedPrefix(request.tenant, request.cache_salt, adapters, request.token_ids)
        self._granting += 1
        try:
            num_cached, _ = await engine.export_blocks(prefix, request.first, 0)
        except errors.RequestError:
            return internal.BlockLease()
        finally:
            self._granting -= 1
        if num_cached <= request.first or self._engine is not engine:
            return internal.BlockLease()
        lease = self._leases.grant(prefix, request.first, num_cached, time.monotonic())
        self._open[lease.name] = _OpenLease(lease, engine, config)
        self.none_leased.clear()
        return internal.BlockLease(lease=lease.name, num_blocks=num_cached - request.first)

    async def read(self, lease: str, block: int) -> bytes | None:
        self._drop_expired()
        known = self._leases.use(lease, time.monotonic())
        if known is None or not known.first <= block < known.end:
            return None
        return await self._open[lease].read(block)

    def end(self, lease: str) -> None:
        self._leases.end(lease)
        self._drop_expired()

    def tick(self, now: float) -> None:
        """Ends the leases that nobody uses any more."""
        self._leases.expire(now)
        self._drop_expired()

    def _drop_expired(self) -> None:
        for name in self._open.keys() - self._leases.names():
            del self._open[name]
        if not self._open:
            self.none_leased.set()


def _may_read(request: internal.BlockLeaseRequest, config: contract.EngineConfig) -> bool:
    if not config.kv_identity or request.identity != config.kv_identity:
        return False
    if len(request.adapters) > limits.MAX_ADAPTERS:
        return False
    return 0 < len(request.token_ids) <= _TOKEN_BYTES * config.context_length and not len(request.token_ids) % 4
