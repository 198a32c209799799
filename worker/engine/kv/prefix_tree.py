"""The prefix tree: which runs of tokens are known, each below the run before it (decision 0008).

    root of a domain --- block --- block --- block --- partial block
                               `-- block --- partial block

A block holds `block_size` token ids; a partial block, which is always a leaf, fewer. A child is found by its tokens
themselves, so no two prefixes can be mistaken for each other; the chained hash is only the block's name on the wire.
The tree also notes which full blocks came and went, for routers.
"""

import bisect
import dataclasses
import hashlib
import itertools
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash
from tokenbus.protocol.wire.block_hash import TOKEN_BYTES
from tokenbus.worker.engine.kv.retention import SessionKey

DIGEST_BYTES = 16


class Domain(NamedTuple):
    """The things, besides the model, that two sequences must have in common to share blocks."""

    tenant: str = ""
    cache_salt: str = ""
    adapters: tuple[block_hash.Adapter, ...] = ()


class RootName(NamedTuple):
    """Names a domain without revealing its tenant or cache salt."""

    hash: int
    """The parent of the hashes of its first blocks."""
    digest: bytes


def root_name(domain: Domain, fingerprint: str) -> RootName:
    """Returns the name of a domain of the model with a fingerprint."""
    named = block_hash.PrefixDomain(fingerprint, domain.adapters, domain.tenant, domain.cache_salt)
    return RootName(block_hash.root_hash(named), digest_of(repr(named).encode(errors="surrogatepass")))


class StoredBlock(NamedTuple):
    """The hash of a newly known block, and that of the block before it."""

    parent: int
    hash: int


class BlockLabel(NamedTuple):
    """Identifies the block of a copy to an engine that does not have the block: its tokens and all before them.

    Digests are cryptographic, unlike the hashes on the wire: no choice of prompts makes two blocks look alike."""

    root_hash: int
    root_digest: bytes
    """A digest of the domain: a label does not reveal tenants or cache salts."""
    parent_digest: bytes
    """The digest of the block before, or of the root."""
    start: int
    tokens: bytes
    is_state: bool = False
    """Whether it is a copy of the state after its tokens, not of their keys and values (checkpoints.py)."""


class KvEvents(NamedTuple):
    """Full blocks that came and went, in the order in which a router must apply them: `removed`, then `stored`."""

    removed: list[int]
    stored: list[StoredBlock]


class BlockNames:
    """The hashes of the known full blocks, and the events not yet reported to routers.

    Two blocks may have the same hash: a client that chooses tokens or cache salts finds such blocks in minutes. The
    hash comes with the first of them, and goes with the last."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._stored: dict[int, StoredBlock] = {}
        self._removed: list[int] = []

    def __repr__(self) -> str:
        return f"<BlockNames {len(self._counts)}>"

    def add(self, parent: int, name: int) -> None:
        """Notes a new block, given the hash of the block before it and its own."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if not count:
            self._stored[name] = StoredBlock(parent, name)

    def remove(self, name: int) -> None:
        """Notes that a block is gone."""
        if count := self._counts.pop(name) - 1:
            self._counts[name] = count
        # A block that came and went since the last report is in neither list.
        elif self._stored.pop(name, None) is None:
            self._removed.append(name)

    def take_events(self) -> KvEvents:
        """Returns the events since the last call."""
        events = KvEvents(self._removed, list(self._stored.values()))
        self._removed, self._stored = [], {}
        return events


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Block:
    """A node of the tree. `tokens` are its token ids as bytes, `start` and `end` their positions in the sequence."""

    parent: "Block | None"
    tokens: bytes
    start: int
    hash: int
    """The chained hash; 0 for a partial block, which has none."""
    end: int = dataclasses.field(init=False)
    children: "dict[bytes, Block]" = dataclasses.field(default_factory=dict, init=False)
    _keys: list[bytes] = dataclasses.field(default_factory=list, init=False)
    """The tokens of the children, sorted."""
    _digest: bytes = dataclasses.field(default=b"", init=False)
    ref_count: int = dataclasses.field(default=0, init=False)
    """The number of sequences that use it."""
    lanes: int = dataclasses.field(default=0, init=False)
    """The lanes that carry it, one bit for each."""
    end_lane: int | None = dataclasses.field(default=None, init=False)
    """The idle lane whose last block this is."""
    host_copy: int | None = dataclasses.field(default=None, init=False)
    """The id of its copy in host memory."""
    was_used: bool = dataclasses.field(default=False, init=False)
    """Whether a sequence that has it has ended, or lost its memory."""
    is_continued: bool = dataclasses.field(default=False, init=False)
    """Whether it belongs to a prompt that continued a cached one."""
    kept_until: float = dataclasses.field(default=0.0, init=False)
    """The time until which it is kept at a client's request; 0 if it is not (retention.py)."""
    owner: SessionKey | None = dataclasses.field(default=None, init=False)
    """The session that has used it, or None."""

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        copy = "" if self.host_copy is None else f", copy {self.host_copy}"
        return f"<Block {self.hash:016x} {self.start}-{self.end}, {self.ref_count} refs, lanes {self.lanes:b}{copy}>"

    @property
    def any_lane(self) -> int:
        """One of the lanes that carry it."""
        assert self.lanes, self
        return (self.lanes & -self.lanes).bit_length() - 1  # x & -x is the lowest bit of x

    @property
    def digest(self) -> bytes:
        """A digest of all tokens up to its end, and of the domain; computed when first needed."""
        for block in reversed(list(itertools.takewhile(lambda one: not one._digest, self.path()))):
            assert block.parent is not None
            block._digest = digest_of(block.parent._digest + block.tokens)
        return self._digest

    def label(self) -> BlockLabel:
        """Returns what another engine must know to find the block."""
        assert self.parent is not None, self
        node = self
        while node.parent is not None:
            node = node.parent
        return BlockLabel(node.hash, node.digest, self.parent.digest, self.start, self.tokens)

    def longest_match(self, tokens: bytes) -> "tuple[Block, int] | None":
        """The child with the most leading tokens in common with `tokens`, and their number; None if there is none.

        In byte order, the child with the longest common prefix is one of the two neighbours."""
        at = bisect.bisect_left(self._keys, tokens)
        found = [(block_hash.num_common_tokens(key, tokens), key) for key in self._keys[max(0, at - 1) : at + 1]]
        most, key = max(found, default=(0, b""))
        return (self.children[key], most) if most else None

    def proper_prefixes(self, tokens: bytes) -> "list[Block]":
        """The children whose tokens are a proper prefix of `tokens`, the shortest first."""
        if len(self.children) < len(tokens) // TOKEN_BYTES:
            short = (key for key in self._keys if len(key) < len(tokens))
            return [self.children[key] for key in short if tokens.startswith(key)]
        lengths = range(TOKEN_BYTES, len(tokens), TOKEN_BYTES)
        return [child for length in lengths if (child := self.children.get(tokens[:length])) is not None]

    def path(self) -> "Iterator[Block]":
        """This block and its ancestors, deepest first, without the root."""
        block = self
        while block.parent is not None:
            yield block
            block = block.parent

    def descendants(self) -> "Iterator[Block]":
        """All descendants, deepest first."""
        found = list(self.children.values())
        for block in found:  # grows during the iteration
            found.extend(block.children.values())
        yield from reversed(found)


class Root(Block):
    """The node before the first block of a domain.

    `domain` is None while it is known only by its hash and digest, from labels of an earlier engine's copies."""

    __slots__ = ("domain",)

    def __init__(self, domain: Domain | None, name: int, digest: bytes) -> None:
        super().__init__(None, b"", 0, name)
        self.domain = domain
        self._digest = digest


class PrefixTree:
    """All known blocks, by domain."""

    def __init__(self, block_size: int, fingerprint: str) -> None:
        self._block_size = block_size
        self._width = block_size * TOKEN_BYTES
        self._fingerprint = fingerprint
        self._roots: dict[Domain, Root] = {}
        self._recovered_roots: dict[tuple[int, bytes], Root] = {}
        """Roots whose domains are not known yet, by hash and digest."""
        self._names = BlockNames()

    def __repr__(self) -> str:
        return f"<PrefixTree of {len(self._roots)} domains>"

    def make_root(self, domain: Domain) -> Root:
        """The root of a domain, created if necessary."""
        root = self._roots.get(domain)
        if root is None:
            name, digest = root_name(domain, self._fingerprint)
            root = self._recovered_roots.pop((name, digest), None) or Root(domain, name, digest)
            root.domain = domain
            self._roots[domain] = root
        return root

    def recover_root(self, name: int, digest: bytes) -> Root:
        """The root that labels name, created if necessary; `make_root` finds it by its domain."""
        key = name, digest
        return self._recovered_roots.setdefault(key, Root(None, name, digest))

    def resident_path(self, domain: Domain, token_ids: "array[int]") -> list[Block]:
        """The resident blocks with which a prompt of a domain begins; its last token is in none of them."""
        path: list[Block] = []
        block: Block | None = self._roots.get(domain)
        while block is not None and (end := block.end + self._block_size) < len(token_ids):
            block = block.children.get(block_hash.pack_token_ids(token_ids[block.end : end]))
            if block is None or not block.lanes:
                break
            path.append(block)
        return path

    def known_path(self, domain: Domain, token_ids: "array[int]") -> list[Block]:
        """The full blocks with which a run of tokens begins, resident or not."""
        path: list[Block] = []
        root = self.make_root(domain)  # there may be a recovered root
        block: Block | None = root
        while block is not None and (end := block.end + self._block_size) <= len(token_ids):
            block = block.children.get(block_hash.pack_token_ids(token_ids[block.end : end]))
            if block is not None:
                path.append(block)
        self.prune(root)
        return path

    def prune(self, root: Root) -> None:
        """Removes a root that has no blocks and no users."""
        if root.children or root.ref_count:
            return
        if root.domain is None:
            self._recovered_roots.pop((root.hash, root.digest), None)
        else:
            self._roots.pop(root.domain, None)

    def insert(self, parent: Block, tokens: bytes) -> Block:
        """Adds a block below `parent`: a partial one if it has fewer tokens than a block."""
        assert tokens not in parent.children, parent
        name = block_hash.next_hash(parent.hash, tokens) if len(tokens) == self._width else 0
        block = parent.children[tokens] = Block(parent, tokens, parent.end, name)
        bisect.insort(parent._keys, tokens)
        if self.is_full(block):
            self._names.add(parent.hash, name)
        return block

    def remove(self, leaf: Block) -> None:
        """Removes a block that has no children; the root goes with its last block."""
        parent = leaf.parent
        assert parent is not None, leaf
        assert not leaf.children, leaf
        del parent.children[leaf.tokens]
        del parent._keys[bisect.bisect_left(parent._keys, leaf.tokens)]
        if self.is_full(leaf):
            self._names.remove(leaf.hash)
        if isinstance(parent, Root):
            self.prune(parent)

    def take_events(self) -> KvEvents:
        """Returns the events since the last call."""
        return self._names.take_events()

    def is_full(self, block: Block) -> bool:
        return len(block.tokens) == self._width

    def all_blocks(self) -> Iterator[Block]:
        for root in (*self._roots.values(), *self._recovered_roots.values()):
            yield from root.descendants()


def digest_of(data: bytes) -> bytes:
    """Returns a cryptographic digest."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
