"""The interface of all transports of blocks between workers.

A transport has two ends. One serves the blocks of its worker's `BlockHolder`, the other reads blocks of other workers.
It moves bytes and checks that they have arrived intact; its users check what they mean. A transport between GPUs would
be another implementation of the same interface."""

import enum
from collections.abc import Awaitable
from typing import Protocol

from tokenbus.protocol.wire import internal


class TransferError(Exception):
    """Blocks could not be fetched; `outcome` says why: one of the metrics' FETCH_OUTCOMES."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class NoBlock(enum.Enum):
    """Why a holder does not return a block."""

    GONE = enum.auto()
    """It no longer has the block, or never had it."""
    LATER = enum.auto()
    """It does not have the block yet."""


class LeasedBlocks(Protocol):
    """Blocks that another worker has promised to serve for as long as they are read."""

    num_blocks: int
    """The number of readable blocks, from the first one requested."""

    def read(self, block: int, num_bytes: int) -> Awaitable[bytes]:
        """Returns the content of a block, given its number in the prompt and its exact size. Several may be read
        concurrently. Raises TransferError."""
        ...

    def close(self) -> None:
        """Ends the lease. Nothing may be read afterwards."""
        ...


class Transport(Protocol):
    """Reads blocks of other workers."""

    async def lease(self, worker_id: str, request: internal.BlockLeaseRequest) -> LeasedBlocks:
        """Asks another worker of the model for blocks. Raises TransferError if it offers none."""
        ...


class BlockHolder(Protocol):
    """Serves its own worker's blocks, whatever the transport."""

    async def grant(self, request: internal.BlockLeaseRequest) -> internal.BlockLease:
        """Answers another worker's request for blocks."""
        ...

    async def read(self, lease: str, block: int) -> bytes | NoBlock:
        """Returns the content of a block, given its number in the prompt. It does not wait long for one."""
        ...

    def end(self, lease: str) -> None:
        """Ends a lease, if it has not ended."""
        ...
