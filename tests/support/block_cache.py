"""A block pool with its sequences, whose tokens are texts of one tenant."""

from array import array

from tests.support.block_hashes import block_hashes
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.allocation import Allocation
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain, KvEvents
from tokenbus.worker.engine.kv.retention import DEFAULT_LIMITS, NO_HINT, CacheHint, RetentionLimits

SIZE = 4
ACME = Domain("acme")


def ids(text: str) -> "array[int]":
    """The token ids of a text, one for each character."""
    return array("I", map(ord, text))


def root_of(domain: Domain = ACME) -> int:
    return block_hash.root_hash(block_hash.PrefixDomain("", domain.adapters, domain.tenant, domain.cache_salt))


def hashes(text: str, domain: Domain = ACME) -> list[int]:
    """The hashes of the blocks of a text."""
    return block_hashes(ids(text), SIZE, root_of(domain))


class Cache:
    """A pool with its sequences, whose tokens are texts; checked after every operation."""

    def __init__(
        self,
        total_blocks: int = 16,
        num_lanes: int = 4,
        *,
        host_blocks: int = 0,
        can_share: bool = True,
        writes_through: bool = False,
        limits: RetentionLimits = DEFAULT_LIMITS,
        min_prefix_tokens: int = 0,
    ) -> None:
        self.pool = BlockPool(
            total_blocks,
            SIZE,
            num_lanes,
            host_blocks=host_blocks,
            can_share=can_share,
            writes_through=writes_through,
            limits=limits,
            min_prefix_tokens=min_prefix_tokens,
        )
        self.allocations: dict[int, Allocation] = {}
        self._texts: dict[int, str] = {}
        self._computed: dict[int, int] = {}

    def can_allocate(self, num_tokens: int, text: str = "?", reserved_blocks: int = 0) -> bool:
        can = self.pool.can_allocate(ACME, ids(text), num_tokens, reserved_blocks)
        self.pool.check_integrity()
        return can

    def allocate(self, seq_no: int, text: str, domain: Domain | None = ACME, hint: CacheHint = NO_HINT) -> int:
        self.allocations[seq_no] = self.pool.allocate(domain, hint=hint)
        self._texts[seq_no], self._computed[seq_no] = text, 0
        self.pool.check_integrity()
        return self.allocations[seq_no].lane

    def reuse_prefix(self, seq_no: int) -> int:
        token_ids = ids(self._texts[seq_no])
        self._computed[seq_no] = self.allocations[seq_no].reuse_prefix(token_ids, self._computed[seq_no])
        self.pool.check_integrity()
        return self._computed[seq_no]

    def allocate_blocks(self, seq_no: int, num_tokens: int) -> bool:
        has_room = self.allocations[seq_no].allocate_blocks(num_tokens)
        self.pool.check_integrity()
        return has_room

    def compute(self, seq_no: int, num_tokens: int) -> None:
        """Computes the first `num_tokens` of a sequence, as steps do."""
        assert self.allocate_blocks(seq_no, num_tokens)
        self.allocations[seq_no].cache_blocks(ids(self._texts[seq_no]), num_tokens)
        self._computed[seq_no] = num_tokens
        self.pool.check_integrity()

    def free(self, seq_no: int) -> None:
        token_ids = ids(self._texts.pop(seq_no))
        self.pool.free(self.allocations.pop(seq_no), token_ids, self._computed.pop(seq_no))
        self.pool.check_integrity()

    def run(self, text: str, domain: Domain | None = ACME, hint: CacheHint = NO_HINT) -> None:
        """Has sequence 99 compute a text and end."""
        self.allocate(99, text, domain=domain, hint=hint)
        self.reuse_prefix(99)
        self.compute(99, len(text))
        self.free(99)

    def reused(self, text: str, domain: Domain | None = ACME) -> int:
        """Starts sequence 100 and returns how many of its tokens it need not compute."""
        self.allocate(100, text, domain=domain)
        return self.reuse_prefix(100)

    def fill(self, num_blocks: int) -> None:
        """Has sequence 101, without a domain, use that many blocks."""
        if 101 not in self._texts:
            self.allocate(101, "", domain=None)
        assert self.allocate_blocks(101, SIZE * num_blocks)

    def kv_ops(self) -> list[KvOp]:
        """Returns the KV ops since the last time."""
        return self.pool.cache.ops.take()

    def events(self) -> KvEvents:
        return self.pool.cache.tree.take_events()

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The numbers of used, evictable and free blocks."""
        return self.pool.cache.used_blocks, self.pool.cache.evictable_blocks, self.pool.cache.free_blocks


def offloaded_cache(total_blocks: int = 3, host_blocks: int = 8, offloads: int = 99) -> Cache:
    """A cache with host memory that had to evict "aaaabbbb"."""
    cache = Cache(total_blocks, num_lanes=2, host_blocks=host_blocks)
    cache.run("aaaabbbb")
    cache.pool.cache.host.set_limits(offloads, onloads=99)
    cache.kv_ops()
    cache.events()
    cache.fill(total_blocks)
    return cache
