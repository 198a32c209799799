"""Fetches the blocks of a prompt from another worker, checks them, and hands them to the engine (decision 0057).

If anything goes wrong, the prompt is computed from the last received block on. A fetch may take half the time that
computing its blocks would, within an absolute limit. A remote prefill, whose blocks the other worker has yet to
compute, may take twice as long as the router expects.

Whether a block's numbers are what the model would compute can't be checked: workers of a model trust each other in
that. Everything else is compared, since an engine may abort on a block in another format.
"""

import asyncio
import struct
import time
from collections import deque
from typing import NamedTuple

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.wire import codec, internal
from tokenbus.protocol.wire.block_hash import TOKEN_BYTES
from tokenbus.worker.broker.replica_state import Serving
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.contract import KvBlockFormat
from tokenbus.worker.kv_exchange.transport import BlockTransport, LeasedBlocks, Pace, TransferError

MAX_FETCHES = 2
MAX_REMOTE_PREFILLS = 16
"""Fetches that wait for blocks to be computed, which takes time but costs little."""
MAX_FETCH_S = 5.0
STALL_S = 1.0
"""A fetch ends if no block arrives for this long."""
REMOTE_PREFILL_PATIENCE = 2.0
"""The number of times its expected duration that a remote prefill may take."""
_SHARE = 0.5
"""A fetch may take this share of the time that computing would take."""
_BLOCKS_AHEAD = 8
_BATCH_BYTES = 1024 * 1024
"""Bytes of blocks handed to the engine at a time: between two steps, each batch costs a millisecond or two."""


class Fetch(NamedTuple):
    """A finished fetch."""

    outcome: str
    """`complete`, `partial` if some blocks arrived, or a word for why none did."""
    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_held: int = 0
    """Tokens of whole blocks that were already there."""


class Fetcher:
    """The fetches of one worker."""

    def __init__(self, transport: BlockTransport) -> None:
        self._transport = transport
        self._pace = Pace()
        self.num_running = 0
        """Fetches of existing blocks."""
        self.num_remote_prefills = 0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Fetcher {self.num_running} running, {self.num_remote_prefills} remote prefills>"

    def has_room(self, source: internal.FetchSource) -> bool:
        """Whether another fetch may begin."""
        return self.num_remote_prefills < MAX_REMOTE_PREFILLS if source.leg_ms else self.num_running < MAX_FETCHES

    async def fetch(
        self,
        source: internal.FetchSource,
        prefix: contract.CachedPrefix,
        first: int,
        serving: Serving,
        computed_for: str = "",
        priority: int = 0,
    ) -> Fetch:
        """Fetches the blocks of a prefix from block `first` on, into an engine. The source of a remote prefill
        computes them for the request `computed_for`, with its priority. Raises only CancelledError."""
        began, (engine, config) = time.monotonic(), serving
        is_remote_prefill = source.leg_ms > 0
        fetching = _Fetching(prefix, first, serving, is_remote_prefill=is_remote_prefill)
        if not fetching.num_wanted:  # they have been computed here since the router's choice
            return Fetch("nothing")
        if not self.has_room(source):  # others that were let in together with it have begun
            return Fetch("busy")
        self.num_remote_prefills += is_remote_prefill
        self.num_running += not is_remote_prefill
        request = internal.BlockLeaseRequest(
            identity=config.kv_identity,
            epoch=source.epoch,
            tenant=prefix.tenant,
            cache_salt=prefix.cache_salt,
            adapters=[internal.RunAdapter(digest=one.digest, scale=one.scale) for one in prefix.adapters],
            token_ids=fetching.prefix.token_ids,
            first=first,
            computed_for=computed_for if is_remote_prefill else "",
            priority=priority if is_remote_prefill else 0,
        )
        limit_s, speed = MAX_FETCH_S, engine.prefill_tokens_per_s
        if is_remote_prefill:
            limit_s = REMOTE_PREFILL_PATIENCE * source.leg_ms / 1e3 + STALL_S
        elif speed is not None:
            limit_s = min(limit_s, _SHARE * fetching.num_wanted * config.kv_block_size / speed)
        try:
            async with asyncio.timeout(limit_s):
                await self._fetch(source, request, fetching)
            outcome = "complete"
        except TimeoutError:
            outcome = "timeout"
        except TransferError as error:
            outcome = error.outcome
        except Exception:  # outermost frame of a fetch: the prompt is computed instead
            self._log.exception("fetch_failed", source=source.worker_id)
            outcome = "failed"
        finally:
            self.num_remote_prefills -= is_remote_prefill
            self.num_running -= not is_remote_prefill
        fetching.flush()
        if fetching.num_fetched and outcome != "complete":
            outcome = "partial"
        num_tokens = fetching.num_fetched * config.kv_block_size
        seconds, num_held = time.monotonic() - began, first * config.kv_block_size
        return Fetch(outcome, num_tokens, fetching.num_bytes, seconds, num_held)

    async def _fetch(
        self, source: internal.FetchSource, request: internal.BlockLeaseRequest, fetching: "_Fetching"
    ) -> None:
        """Reads blocks in order, a few ahead of the next one."""
        assert fetching.config.kv_format is not None
        num_bytes = fetching.config.kv_format.num_bytes
        lease = await self._transport.lease(source.worker_id, request)
        reads: deque[asyncio.Task[bytes]] = deque()
        following, end = fetching.first, fetching.first + min(lease.num_blocks, fetching.num_wanted)
        try:
            while reads or following < end:
                while following < end and len(reads) < _BLOCKS_AHEAD:
                    reads.append(tasks.awaited(self._read_block(lease, following, num_bytes, fetching.engine)))
                    following += 1
                async with asyncio.timeout(None if source.leg_ms else STALL_S):
                    block = await asyncio.shield(reads[0])
                reads.popleft()
                if problem := fetching.take(block):
                    self._log.error("block_refused", source=source.worker_id, problem=problem)
                    raise TransferError("refused", problem)
        finally:
            for read in reads:
                read.cancel()
            lease.close()
            await asyncio.gather(*reads, return_exceptions=True)

    async def _read_block(self, lease: LeasedBlocks, block: int, num_bytes: int, engine: contract.Engine) -> bytes:
        if engine.load().running:
            await asyncio.sleep(self._pace.delay_s(num_bytes, time.monotonic()))
        return await lease.read(block, num_bytes)


class _Fetching:
    """The blocks of one fetch on their way to the engine."""

    def __init__(
        self, prefix: contract.CachedPrefix, first: int, serving: Serving, *, is_remote_prefill: bool = False
    ) -> None:
        self.engine, self.config = serving
        self._size = self.config.kv_block_size
        num_tokens = len(prefix.token_ids) // TOKEN_BYTES
        num_blocks = num_tokens // self._size
        if is_remote_prefill and num_blocks > first:
            num_blocks = _num_filled(num_tokens, self._size, self.config.context_length)
        # the last block may hold the last token, which is computed in any case: the others are useful
        self.prefix = _in_blocks(prefix, num_blocks, self._size)
        self.first = first
        self.num_wanted = max(0, num_blocks - first)
        self.num_fetched = 0
        self.num_bytes = 0
        self._batch: list[bytes] = []

    def take(self, block: bytes) -> str:
        """Takes the next block, and returns why it is invalid; empty if it is valid."""
        assert self.config.kv_format is not None
        start = (self.first + self.num_fetched) * self._size
        if problem := block_problem(self.config.kv_format, block, start):
            return problem
        self._batch.append(block)
        self.num_fetched += 1
        self.num_bytes += len(block)
        if len(self._batch) * len(block) >= _BATCH_BYTES:
            self.flush()
        return ""

    def flush(self) -> None:
        """Hands the collected blocks to the engine."""
        if self._batch:
            end = self.first + self.num_fetched
            prefix = codec.replace(self.prefix, token_ids=self.prefix.token_ids[: TOKEN_BYTES * self._size * end])
            self.engine.put_blocks(prefix, end - len(self._batch), self._batch)
            self._batch = []


def _num_filled(num_tokens: int, size: int, context_length: int) -> int:
    """Returns the number of blocks of a prompt with the last one padded, so that all tokens but the last are in whole
    blocks. If no padding is needed, or there is no room for it, the number of whole blocks."""
    num_blocks = -(-(num_tokens - 1) // size)
    has_fill = num_tokens <= num_blocks * size < context_length
    return num_blocks if has_fill else num_tokens // size


def _in_blocks(prefix: contract.CachedPrefix, num_blocks: int, size: int) -> contract.CachedPrefix:
    """Returns a prefix cut to that many blocks, or padded to them with copies of its last token:

        prompt    |- a b c d -|- e f g h -|- i j k -|
        filled    |- a b c d -|- e f g h -|- i j k k -|

    Later tokens don't affect a token's keys and values."""
    num_bytes = TOKEN_BYTES * size * num_blocks
    fill = prefix.token_ids[-TOKEN_BYTES:] * ((num_bytes - len(prefix.token_ids)) // TOKEN_BYTES)
    return codec.replace(prefix, token_ids=prefix.token_ids[:num_bytes] + fill)


_NUMBER = struct.Struct("<i")


def block_problem(block_format: KvBlockFormat, block: bytes, start: int) -> str:
    """Returns why these bytes can't be the block whose first token is at position `start`; empty if they can."""
    if len(block) != block_format.num_bytes:
        return f"it has {len(block)} bytes, a block has {block_format.num_bytes}"
    for offset, expected in block_format.fixed:
        if block[offset : offset + len(expected)] != expected:
            return f"it differs in what all blocks have at byte {offset}"
    found = [{_NUMBER.unpack_from(block, at)[0] for at in places} for places in block_format.positions]
    if sorted(map(sorted, found)) != [[position] for position in range(start, start + len(found))]:
        return f"its tokens are not those from {start} on"
    if any(not 0 <= _NUMBER.unpack_from(block, at)[0] < block_format.vocab_size for at in block_format.token_ids):
        return f"the vocabulary has {block_format.vocab_size} tokens, and a block's is none of them"
    return ""
