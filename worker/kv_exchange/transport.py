"""The interface of all transports of blocks between workers.

A transport has two ends. One serves what the `BlockHolder` of its worker gives, the other reads blocks of other
workers. It moves bytes and checks that all of them have arrived as they were sent; what they mean is checked by those
who use it. A transport between GPUs would be another implementation of the same interface."""

import enum
from collections.abc import Awaitable
from typing import Protocol

from tokenbus.protocol.wire import internal


class TransferError(Exception):
    """Blocks could not be had; `outcome` says why, in one of the metrics' FETCH_OUTCOMES."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class NoBlock(enum.Enum):
    """Why a holder does not give a block."""

    GONE = enum.auto()
    """It has the block no more, or never had it."""
    LATER = enum.auto()
    """It will have the block."""


class LeasedBlocks(Protocol):
    """Blocks that another worker has promised to give for as long as they are read."""

    num_blocks: int
    """Blocks that can be read, from the first one that was asked for."""

    def read(self, block: int, num_bytes: int) -> Awaitable[bytes]:
        """Returns the content of a block, by its number in the prompt, of exactly that size. Several may be read at a
        time. Raises TransferError."""
        ...

    def close(self) -> None:
        """Ends the lease. Nothing is read afterwards."""
        ...


class Transport(Protocol):
    """Reads blocks of other workers."""

    async def lease(self, worker_id: str, request: internal.BlockLeaseRequest) -> LeasedBlocks:
        """Asks another worker of the model for blocks. Raises TransferError if it gives none."""
        ...


class BlockHolder(Protocol):
    """Gives blocks of its own worker, whatever the transport."""

    async def grant(self, request: internal.BlockLeaseRequest) -> internal.BlockLease:
        """Answers another worker's question for blocks."""
        ...

    async def read(self, lease: str, block: int) -> bytes | NoBlock:
        """Returns the content of a block, by its number in the prompt. It does not wait long for one."""
        ...

    def end(self, lease: str) -> None:
        """Ends a lease, if it has not ended."""
        ...
