"""An engine and a transport that do as a test says."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import cast

import xxhash

from tests.support.arithmetic import block_of, exchanging, make_config
from tokenbus.protocol.wire import block_hash, internal, messages
from tokenbus.worker.broker.replica_state import Serving
from tokenbus.worker.contract import contract
from tokenbus.worker.kv_exchange import fetcher
from tokenbus.worker.kv_exchange.holder import GivenBlock
from tokenbus.worker.kv_exchange.transport import TransferError

SIZE = 16
CONFIG = exchanging(make_config(kv_block_size=SIZE, context_length=4_096))
ADAPTERS = (block_hash.Adapter("a1", 0.5), block_hash.Adapter("b2", 1.0))
SOURCE = internal.FetchSource(worker_id="a", epoch="1-x")


def prefix(num_blocks: int) -> contract.CachedPrefix:
    """A prompt with so many blocks that can be fetched, and a token behind them."""
    return contract.CachedPrefix("acme", "salt", ADAPTERS, block_hash.pack_token_ids(range(SIZE * num_blocks + 1)))


def block(number: int) -> bytes:
    return block_of({at: at for at in range(SIZE * number, SIZE * (number + 1))})


def given_block(number: int) -> GivenBlock:
    """Returns a block as a holder gives it."""
    return GivenBlock(block(number), xxhash.xxh3_64_intdigest(block(number)))


class StubEngine:
    """Holds whatever blocks it is given, which must be right, and gives those that it has."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.prefill_tokens_per_s: float | None = None
        self.running = 0
        self.last_exports: list[bool] = []
        """For each export, whether it was said to be the last one."""
        self.gate = asyncio.Event()
        self.gate.set()

    def load(self) -> messages.Load:
        return messages.Load(running=self.running)

    def put_blocks(self, given: contract.CachedPrefix, first: int, blocks: list[bytes]) -> None:
        assert (given.tenant, given.cache_salt, given.adapters) == ("acme", "salt", ADAPTERS)
        assert len(array("I", given.token_ids)) == SIZE * (first + len(blocks))
        for number, content in enumerate(blocks, start=first):
            assert CONFIG.kv_format is not None
            assert fetcher.block_problem(CONFIG.kv_format, content, SIZE * number) == ""
            self.blocks[number] = content

    async def export_blocks(
        self, asked: contract.CachedPrefix, first: int, max_blocks: int, *, is_last: bool = False
    ) -> tuple[int, list[bytes]]:
        self.last_exports.append(is_last)
        await self.gate.wait()
        num_asked = len(asked.token_ids) // 4 // SIZE
        if (asked.tenant, asked.cache_salt, asked.adapters) != ("acme", "salt", ADAPTERS):
            return 0, []
        num_cached = 0
        while num_cached < num_asked and num_cached in self.blocks:
            num_cached += 1
        return num_cached, [self.blocks[at] for at in range(first, min(num_cached, first + max_blocks))]


def serving(engine: StubEngine, config: contract.EngineConfig = CONFIG) -> Serving:
    return Serving(cast(contract.Engine, engine), config)


Read = Callable[[int, int], Awaitable[bytes]]


class StubTransport:
    """One holder, whose answers a test makes."""

    def __init__(self, num_blocks: int, read: Read) -> None:
        self.num_blocks = num_blocks
        self._read = read
        self.requests: list[internal.BlockLeaseRequest] = []
        self.num_closed = 0

    async def lease(self, worker_id: str, request: internal.BlockLeaseRequest) -> "StubTransport":
        self.requests.append(request)
        if not self.num_blocks:
            raise TransferError("nothing", "it has none")
        return self

    def read(self, block: int, num_bytes: int) -> Awaitable[bytes]:
        return self._read(block, num_bytes)

    def close(self) -> None:
        self.num_closed += 1
