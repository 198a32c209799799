"""The tree of prefixes: which runs of tokens are known, by what came before them.

    root of a domain --- block --- block --- block --- tail
                               `-- block --- tail

A block holds `block_size` token ids; a tail, which is always a leaf, fewer. A child is found by its tokens themselves,
so that no two prefixes can ever be taken for each other; the chained hash is only its name on the wire.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash

_TOKEN_BYTES = 4


class Domain(NamedTuple):
    """What two sequences must have in common before they may share anything. The model is the engine's."""

    tenant: str = ""
    cache_salt: str = ""
    adapters: tuple[block_hash.Adapter, ...] = ()


class Block:
    """A node of the tree. `tokens` are its token ids as bytes, `start` the number of tokens before it."""

    __slots__ = (
        "_keys",
        "children",
        "end_lane",
        "hash",
        "host_copy",
        "lanes",
        "parent",
        "ref_count",
        "start",
        "tokens",
    )

    def __init__(self, parent: "Block | None", tokens: bytes, start: int, name: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.start = start
        self.hash = name
        """The chained hash; a tail has none and says 0."""
        self.children: dict[bytes, Block] = {}
        self._keys: list[bytes] = []
        self.lanes = 0
        """The lanes that carry it, one bit for each."""
        self.end_lane: int | None = None
        """The idle lane that carries nothing beyond it."""
        self.ref_count = 0
        """Sequences that use it."""
        self.host_copy: int | None = None
        """The number of its copy in host memory."""

    def __repr__(self) -> str:
        kept = f"lanes {self.lanes:b}" + ("" if self.host_copy is None else ", saved")
        return f"<Block {self.hash:016x} of {self.start}-{self.end}, {self.ref_count} refs, {kept}>"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_resident(self) -> bool:
        """Whether a lane carries it."""
        return self.lanes != 0

    @property
    def any_lane(self) -> int:
        """One of the lanes that carry it."""
        assert self.lanes, self
        return (self.lanes & -self.lanes).bit_length() - 1

    def add_child(self, child: "Block") -> None:
        assert child.tokens not in self.children, child
        self.children[child.tokens] = child
        bisect.insort(self._keys, child.tokens)

    def remove_child(self, child: "Block") -> None:
        del self.children[child.tokens]
        del self._keys[bisect.bisect_left(self._keys, child.tokens)]

    def longest_match(self, tokens: bytes) -> "tuple[Block, int] | None":
        """The child that begins with most of `tokens`, and how many of them that is; None if there is no such one.

        In the order of bytes the longest common beginning is with one of the two neighbours."""
        at = bisect.bisect_left(self._keys, tokens)
        found = [(num_common_tokens(key, tokens), key) for key in self._keys[max(0, at - 1) : at + 1]]
        most, key = max(found, default=(0, b""))
        return (self.children[key], most) if most else None

    def proper_prefixes(self, tokens: bytes) -> "list[Block]":
        """The children whose tokens are a proper beginning of `tokens`, the shortest first."""
        if len(self.children) < len(tokens) // _TOKEN_BYTES:
            short = (key for key in self._keys if len(key) < len(tokens))
            return [self.children[key] for key in short if tokens.startswith(key)]
        found = []
        for length in range(_TOKEN_BYTES, len(tokens), _TOKEN_BYTES):
            child = self.children.get(tokens[:length])
            if child is not None:
                found.append(child)
        return found

    def path(self) -> "Iterator[Block]":
        """This block and all before it, deepest first, without the root."""
        block = self
        while block.parent is not None:
            yield block
            block = block.parent

    def descendants(self) -> "Iterator[Block]":
        """Every block behind this one, deepest first."""
        found = list(self.children.values())
        for block in found:
            found.extend(block.children.values())
        yield from reversed(found)


class Root(Block):
    """What stands before the first block of a domain."""

    __slots__ = ("domain",)

    def __init__(self, domain: Domain, name: int) -> None:
        super().__init__(None, b"", 0, name)
        self.domain = domain


class PrefixTree:
    """All blocks that are known, by domain."""

    def __init__(self, block_size: int, fingerprint: str) -> None:
        self.block_size = block_size
        self._width = block_size * _TOKEN_BYTES
        self._fingerprint = fingerprint
        self._roots: dict[Domain, Root] = {}

    def __repr__(self) -> str:
        return f"<PrefixTree of {len(self._roots)} domains>"

    def root(self, domain: Domain) -> Root:
        """The root of a domain, made if there is none."""
        root = self._roots.get(domain)
        if root is None:
            named = block_hash.PrefixDomain(self._fingerprint, domain.adapters, domain.tenant, domain.cache_salt)
            root = self._roots[domain] = Root(domain, block_hash.root_hash(named))
        return root

    def prune(self, root: Root) -> None:
        """Lets a root go if nothing hangs on it and nobody uses it."""
        if not root.children and not root.ref_count:
            self._roots.pop(root.domain, None)

    def add_block(self, parent: Block, tokens: bytes) -> Block:
        """A new block behind `parent`; a tail if it has fewer tokens than a block."""
        name = block_hash.next_hash(parent.hash, tokens) if len(tokens) == self._width else 0
        block = Block(parent, tokens, parent.end, name)
        parent.add_child(block)
        return block

    def is_full(self, block: Block) -> bool:
        return len(block.tokens) == self._width

    def all_blocks(self) -> Iterator[Block]:
        for root in self._roots.values():
            yield from root.descendants()


def num_common_tokens(one: bytes, other: bytes) -> int:
    """With how many equal token ids two runs begin."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // _TOKEN_BYTES
    low, high = 0, most // _TOKEN_BYTES  # equal up to low, different within high
    while high - low > 1:
        middle = (low + high) // 2
        if one[: middle * _TOKEN_BYTES] == other[: middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
