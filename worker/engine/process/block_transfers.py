"""Blocks that a replica gives to other workers and takes from them, between two steps of its loop."""

import time
from array import array
from collections import deque
from collections.abc import Callable

import structlog

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract import contract
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.process import ipc


class BlockTransfers:
    """Serves waiting exports for at most `budget_s` between two steps, so that no stream waits long for them."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        report: Callable[[ipc.ExportedBlocks | ipc.BlocksRefused], None],
        budget_s: float,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._report = report
        self._budget_s = budget_s
        self._exports: deque[ipc.ExportBlocks] = deque()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<BlockTransfers {len(self._exports)} waiting>"

    @property
    def has_work(self) -> bool:
        return bool(self._exports)

    def add(self, command: ipc.ExportBlocks) -> None:
        """Adds an export, to be served between two steps."""
        self._exports.append(command)

    def put(self, command: ipc.PutBlocks) -> None:
        """Caches blocks at once, so that the sequence they were fetched for finds them. A block that can't be used, and
        those after it, are left out: what is missing is computed."""
        domain, token_ids = _unpack(command.prefix)
        blocks = self._usable(command)
        copies = self._pool.put(domain, token_ids, command.first, len(blocks))
        self._runner.apply(self._pool.cache.ops.take())
        for copy_id, block in zip(copies, blocks, strict=False):
            if copy_id is not None:
                self._copies.write(copy_id, block)

    def _usable(self, command: ipc.PutBlocks) -> list[bytes]:
        size = self._runner.config.kv_block_size
        for number, block in enumerate(command.blocks):
            problem = self._copies.find_problem(memoryview(block), (command.first + number) * size, size)
            if problem:
                self._log.error("block_refused", problem=problem)
                self._report(ipc.BlocksRefused(len(command.blocks) - number))
                return command.blocks[:number]
        return command.blocks

    def step(self) -> None:
        """Serves waiting exports: at least one, and more until the budget is used up. Raises DeviceError."""
        began = time.monotonic()
        while self._exports:
            self._export(self._exports.popleft())
            if time.monotonic() - began >= self._budget_s:
                return

    def _export(self, command: ipc.ExportBlocks) -> None:
        domain, token_ids = _unpack(command.prefix)
        num_cached, copies = self._pool.export(
            domain, token_ids, command.first, command.max_blocks, is_last=command.is_last
        )
        self._runner.apply(self._pool.cache.ops.take())
        blocks = [bytes(self._copies.read(copy_id)) for copy_id in copies]
        self._report(ipc.ExportedBlocks(command.call_id, num_cached, blocks))

    @property
    def _copies(self) -> SlotStore:
        assert self._runner.copies is not None, "an engine without copies exchanges no blocks"
        return self._runner.copies


def _unpack(prefix: contract.CachedPrefix) -> tuple[Domain, "array[int]"]:
    return Domain(prefix.tenant, prefix.cache_salt, prefix.adapters), block_hash.unpack_token_ids(prefix.token_ids)
