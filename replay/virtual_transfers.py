"""Moves KV blocks between the pools of workers in virtual time.

A worker sends one transfer at a time, and receives one at a time. A transfer begins when both ends are free and takes
as long as its bytes do; both compute meanwhile. The blocks are copied when the transfer is requested, so they may be
evicted after that."""

from array import array
from typing import NamedTuple

from tokenbus.replay.settings import ReplaySettings
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain

MAX_TRANSFERS = 2
"""Transfers per worker in each direction; any more are refused."""
_MAX_FETCH_S = 5.0
_MAX_COMPUTING_SHARE = 0.5
"""A receiver waits for at most this share of the time it would take to compute the blocks."""
_MAX_SILENCE_S = 1.0
"""It also gives up if no block arrives for this long."""


class Prefix(NamedTuple):
    """The blocks that may move: those of a prompt, in its domain."""

    domain: Domain
    token_ids: "array[int]"


class VirtualTransfer(NamedTuple):
    """Blocks in transit to a receiver that already holds the first `start` tokens of the prefix."""

    prefix: Prefix
    start: int
    end: int
    began_at: float
    ends_at: float


class TransferLink:
    """One worker's pool and its connection to all others."""

    def __init__(self, pool: BlockPool, settings: ReplaySettings) -> None:
        self._pool = pool
        self._block_size = settings.block_size
        self._block_s = settings.block_size * settings.kv_token_bytes / settings.transfer_mb_per_s / 1e6
        self._sends_until = self._receives_until = 0.0
        self._num_sent = self._num_received = 0

    def __repr__(self) -> str:
        return f"<TransferLink gives {self._num_sent}, receives {self._num_received}>"

    def num_missing(self, prefix: Prefix) -> int:
        """Returns how many tokens of a prefix this worker would have to compute."""
        return len(prefix.token_ids) - self._num_held(prefix)

    def begin(self, source: "TransferLink", prefix: Prefix, compute_s: float, now: float) -> VirtualTransfer | None:
        """Begins to fetch the part of a prefix that another worker holds and this one lacks; None if there is none.

        `compute_s` is the time this worker would take to compute it."""
        start, end = self._num_held(prefix), source._num_held(prefix)
        if end <= start or self._num_received >= MAX_TRANSFERS or source._num_sent >= MAX_TRANSFERS:
            return None
        limit_s = min(_MAX_FETCH_S, _MAX_COMPUTING_SHARE * compute_s)
        began_at = max(now, self._receives_until, source._sends_until)
        count = min((end - start) // self._block_size, int((now + limit_s - began_at) / self._block_s))
        if count <= 0 or began_at + self._block_s - now > _MAX_SILENCE_S:
            return None
        end = start + count * self._block_size
        self._num_received += 1
        source._num_sent += 1
        ends_at = self._receives_until = source._sends_until = began_at + count * self._block_s
        return VirtualTransfer(prefix, start, end, now, ends_at)

    def begin_remote_prefill(
        self, source: "TransferLink", prefix: Prefix, began_at: float, now: float
    ) -> VirtualTransfer | None:
        """Begins to take the blocks that another worker has just computed, since `began_at`; None if there are none.

        All but the last block, which may be partial, have moved meanwhile, as far as both ends were free."""
        start, end = self._num_held(prefix), source._num_held(prefix)
        if end <= start:
            return None
        needed = len(prefix.token_ids) - 1
        if needed - end < self._block_size:
            end = needed
        count = -(-(end - start) // self._block_size)
        free_at = max(began_at, self._receives_until, source._sends_until)
        ends_at = max(free_at + count * self._block_s, now + self._block_s)
        self._num_received += 1
        source._num_sent += 1
        self._receives_until = source._sends_until = ends_at
        return VirtualTransfer(prefix, start, end, began_at, ends_at)

    def finish_sending(self, transfer: VirtualTransfer) -> None:
        """Makes room for another transfer, and demotes the blocks that were sent: they are evicted earlier."""
        self._num_sent -= 1
        prefix = transfer.prefix
        path = self._pool.cache.tree.known_path(prefix.domain, prefix.token_ids[: transfer.end])
        self._pool.cache.demote(path)

    def finish_receiving(self, transfer: VirtualTransfer) -> None:
        """Caches the blocks that have arrived, if there is room for them."""
        self._num_received -= 1
        domain, token_ids, end = transfer.prefix.domain, transfer.prefix.token_ids, transfer.end
        if not self._pool.can_allocate(domain, token_ids[: end + 1], end):
            return
        allocation = self._pool.allocate(domain, is_new=False)
        held = allocation.reuse_prefix(token_ids[: end + 1], 0)
        # if blocks that these follow were evicted meanwhile, these are useless
        if held >= transfer.start and allocation.allocate_blocks(end):
            allocation.cache_blocks(token_ids[:end], end)
            held = end
        self._pool.free(allocation, token_ids[:end], held)
        for block in self._pool.cache.tree.known_path(domain, token_ids[:held]):
            block.was_used &= block.end <= transfer.start  # no sequence has used those that have just arrived

    def _num_held(self, prefix: Prefix) -> int:
        path = self._pool.cache.tree.resident_path(prefix.domain, prefix.token_ids)
        return path[-1].end if path else 0
