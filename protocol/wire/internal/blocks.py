"""The messages by which a worker fetches KV blocks from another worker of its model."""

from typing import Annotated

from tokenbus.protocol.wire import limits
from tokenbus.protocol.wire import messages as public
from tokenbus.protocol.wire.internal.runs import RunAdapter
from tokenbus.protocol.wire.params import COUNT, PRIORITY, Range


class BlockLeaseRequest(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for the KV blocks of a prompt."""

    identity: str
    """`kv_identity` of the worker that asks; a worker with a different one has nothing to give."""
    epoch: str
    """The epoch of the worker that is asked; in any other it has nothing to give."""
    tenant: str
    """The tenant's name as a subject token. Blocks of one tenant are given for requests of that tenant only."""
    cache_salt: str = ""
    """`cache_salt` of the request."""
    adapters: list[RunAdapter] = []
    """The adapters of the run, in the order of their digests: other adapters or scales have other blocks."""
    token_ids: bytes
    """The tokens of the blocks, from the beginning of the prompt, as unsigned 32-bit little-endian integers."""
    first: Annotated[int, COUNT] = 0
    """Number of the first block that is wanted."""
    computed_for: str = ""
    """`<tenant token>:<id>` of a request for which the worker is to compute the blocks that it lacks; if empty, it
    gives only what it has."""
    priority: Annotated[int, PRIORITY] = 0
    """`priority` of that request."""


class BlockLease(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer: how many blocks it can give. It gives them until the lease has not been used for 10 s."""

    lease: str = ""
    """Names the lease; empty if there is none."""
    num_blocks: Annotated[int, COUNT] = 0
    """Blocks that it has or computes, from `first` on and without a gap."""
    busy: bool = False
    """Whether there is no lease because the worker is already giving blocks to others."""


class BlockRead(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a part of a block."""

    lease: str
    """The lease."""
    block: Annotated[int, COUNT] = 0
    """Number of the block in the prompt."""
    offset: Annotated[int, COUNT] = 0
    """Bytes of the block before this part."""
    num_bytes: Annotated[int, Range(0, limits.UPLOAD_PART_BYTES)] = 0
    """Bytes of the part; 0 ends the lease, and is not answered."""


class BlockPart(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a block; empty if the block or the lease is gone, or the block is not there yet."""

    data: bytes = b""
    """The bytes."""
    checksum: int = 0
    """xxh3_64 of the whole block."""
    later: bool = False
    """Whether the block is still to come: ask again."""
