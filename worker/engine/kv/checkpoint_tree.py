"""A radix tree of token runs: which prefixes are known, and which of them end at a checkpoint.

    root of a domain --- run --- run *          * a checkpoint
                           `---- run * --- run *

Unlike the blocks of the prefix tree, runs have any length: a run is split where another prefix diverges or ends.
"""

import dataclasses
from collections.abc import Sequence as Listing
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash
from tokenbus.protocol.wire.block_hash import TOKEN_BYTES
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel, RootName, digest_of
from tokenbus.worker.engine.kv.retention import SessionKey


class TokenRun:
    """A node of the tree: token ids as bytes, following its parent's."""

    __slots__ = ("checkpoint", "children", "end", "parent", "tokens")

    def __init__(self, parent: "TokenRun | None", tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.end: int = (0 if parent is None else parent.end) + len(tokens) // TOKEN_BYTES
        self.children: dict[bytes, TokenRun] = {}
        """By their first token."""
        self.checkpoint: Checkpoint | None = None
        """The checkpoint at its end, if there is one."""

    def __repr__(self) -> str:
        return f"<TokenRun up to {self.end}, {len(self.children)} children, {self.checkpoint!r}>"


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Checkpoint:
    """A position of a prefix from which a lane can continue, as long as it has a state."""

    root: RootName
    """The domain of its tree."""
    base: "Checkpoint | None"
    """The checkpoint whose KV precedes its own; None at the beginning."""
    node: TokenRun | None
    """Its place in the tree; None once it is gone."""
    tokens: dataclasses.InitVar[bytes]
    """The whole prefix that ends at it."""
    start: int = dataclasses.field(init=False)
    end: int = dataclasses.field(init=False)
    digest: bytes = dataclasses.field(init=False)
    """A digest of the tokens, chained through those of its bases."""
    kv_copy: int | None = dataclasses.field(default=None, init=False)
    state_copy: int | None = dataclasses.field(default=None, init=False)
    num_dependents: int = dataclasses.field(default=0, init=False)
    """The number of checkpoints whose base it is."""
    hash: int | None = dataclasses.field(default=None, init=False)
    """The chained hash of its last block; None if it does not end at a block boundary."""
    kept_until: float = dataclasses.field(default=0.0, init=False)
    """The time until which its state is kept at a client's request; 0 if it is not."""
    owner: SessionKey | None = dataclasses.field(default=None, init=False)
    """The session that has used it, or None."""

    def __post_init__(self, tokens: bytes) -> None:
        self.start = 0 if self.base is None else self.base.end
        self.end = len(tokens) // TOKEN_BYTES
        self.digest = digest_of(self.base_digest + tokens[TOKEN_BYTES * self.start :])

    def __repr__(self) -> str:
        state = "" if self.has_state else ", no state"
        return f"<Checkpoint {self.start}-{self.end}, {self.num_dependents} dependents{state}>"

    @property
    def base_digest(self) -> bytes:
        return self.root.digest if self.base is None else self.base.digest

    def kv_label(self, tokens: bytes) -> BlockLabel:
        """Returns what another engine must know about the copy of its KV; `tokens` is the whole prefix."""
        own = tokens[TOKEN_BYTES * self.start :]
        return BlockLabel(self.root.hash, self.root.digest, self.base_digest, self.start, own)

    def state_label(self, tokens: bytes, *, has_kv: bool) -> BlockLabel:
        """Returns what another engine must know about the copy of its state; the KV copy's label, if there is one,
        holds the tokens."""
        if has_kv:
            return BlockLabel(self.root.hash, self.root.digest, self.digest, self.end, b"", is_state=True)
        return self.kv_label(tokens)._replace(is_state=True)

    @property
    def has_state(self) -> bool:
        return self.state_copy is not None

    def path(self) -> "list[Checkpoint]":
        """Returns the checkpoints whose KV it needs, from the beginning."""
        found: list[Checkpoint] = []
        one: Checkpoint | None = self
        while one is not None:
            found.append(one)
            one = one.base
        return found[::-1]


class CheckpointMatch(NamedTuple):
    """The part of a prompt that is known."""

    num_known: int
    """The number of leading tokens shared with some known prefix."""
    checkpoint: Checkpoint | None
    """The deepest checkpoint among them from which a lane can continue."""


def match(root: TokenRun, tokens: bytes, max_tokens: int) -> CheckpointMatch:
    """Returns what is known of a run of tokens, with a checkpoint no deeper than `max_tokens`."""
    deepest: Checkpoint | None = None
    node, at = root, 0
    while True:
        if node.checkpoint is not None and node.checkpoint.has_state and at <= max_tokens:
            deepest = node.checkpoint
        child = node.children.get(_token(tokens, at))
        if child is None:
            return CheckpointMatch(at, deepest)
        at += _num_common(child, tokens, at)
        if at < child.end:
            return CheckpointMatch(at, deepest)
        node = child


def insert(root: TokenRun, tokens: bytes) -> TokenRun:
    """Returns the node at which a run of tokens ends, creating it if necessary."""
    node = root
    while node.end * TOKEN_BYTES < len(tokens):
        first = _token(tokens, node.end)
        child = node.children.get(first)
        if child is None:
            child = node.children[first] = TokenRun(node, tokens[TOKEN_BYTES * node.end :])
        elif (common := _num_common(child, tokens, node.end)) * TOKEN_BYTES < len(child.tokens):
            child = _split(child, common)
        node = child
    return node


def remove(node: TokenRun) -> None:
    """Removes a node's checkpoint, and all nodes that then lead to none."""
    node.checkpoint = None
    while node.parent is not None and node.checkpoint is None and not node.children:
        del node.parent.children[_token(node.tokens, 0)]
        node = node.parent


def _split(node: TokenRun, num_tokens: int) -> TokenRun:
    """Splits a node after its first tokens; returns the first part."""
    parent, cut = node.parent, num_tokens * TOKEN_BYTES
    assert parent is not None
    first = TokenRun(parent, node.tokens[:cut])
    parent.children[_token(node.tokens, 0)] = first
    node.parent, node.tokens = first, node.tokens[cut:]
    first.children[_token(node.tokens, 0)] = node
    return first


def _num_common(child: TokenRun, tokens: bytes, at: int) -> int:
    """Returns how many tokens of a node match those from `at` on. Only these are copied: a prompt may be long."""
    start = TOKEN_BYTES * at
    return block_hash.num_common_tokens(child.tokens, tokens[start : start + len(child.tokens)])


def _token(tokens: bytes, at: int) -> bytes:
    return tokens[TOKEN_BYTES * at : TOKEN_BYTES * (at + 1)]


class _Recovered:
    """The checkpoints found so far, and their tokens."""

    def __init__(self, *, has_kv: bool) -> None:
        self._has_kv = has_kv
        self._by_digest: dict[tuple[RootName, bytes], Checkpoint] = {}
        self.tokens: dict[Checkpoint, bytes] = {}
        self._prefixes: set[tuple[RootName, bytes]] = set()

    def take(self, copy_id: int, label: BlockLabel) -> str:
        """Takes a copy; if it can't be used, returns the reason in a word."""
        if label.is_state and self._has_kv:
            return self._take_state(copy_id, label)
        root = RootName(label.root_hash, label.root_digest)
        base = self._by_digest.get((root, label.parent_digest))
        if base is None and label.parent_digest != label.root_digest:
            return "orphan"
        if label.is_state == self._has_kv or not label.tokens or label.start != (0 if base is None else base.end):
            return "misplaced"
        tokens = label.tokens if base is None else self.tokens[base] + label.tokens
        if (root, tokens) in self._prefixes:
            return "duplicate"
        self._prefixes.add((root, tokens))
        one = Checkpoint(root, base, None, tokens)
        self._by_digest[root, one.digest] = one
        self.tokens[one] = tokens
        if self._has_kv:
            one.kv_copy = copy_id
        else:
            one.state_copy = copy_id
        return ""

    def _take_state(self, copy_id: int, label: BlockLabel) -> str:
        one = self._by_digest.get((RootName(label.root_hash, label.root_digest), label.parent_digest))
        if one is None or one.end != label.start or label.tokens:
            return "orphan"
        if one.has_state:
            return "duplicate"
        one.state_copy = copy_id
        return ""


def recovered_checkpoints(
    copies: Listing[tuple[int, BlockLabel]], *, has_kv: bool
) -> tuple[list[tuple[Checkpoint, bytes]], dict[int, str]]:
    """Returns the checkpoints of copies, given by their ids, with all tokens of their prefixes, bases first and none in
    a tree yet; and the ids of useless copies, with the reason.

    A copy's label identifies it by the digest of its base and its own tokens. A state is useful if all its KV is there,
    from the beginning on; KV is useful if such a state needs it."""
    found = _Recovered(has_kv=has_kv)
    rejected: dict[int, str] = {}
    for copy_id, label in sorted(copies, key=lambda one: (one[1].is_state, one[1].start)):  # KV first, bases first
        if reason := found.take(copy_id, label):
            rejected[copy_id] = reason
    useful = {base for one in found.tokens if one.has_state for base in one.path()}
    rejected |= {one.kv_copy: "orphan" for one in found.tokens if one not in useful and one.kv_copy is not None}
    return [(one, tokens) for one, tokens in found.tokens.items() if one in useful], rejected
