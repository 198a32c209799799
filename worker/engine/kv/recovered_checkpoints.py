"""Restores checkpoints from an earlier engine's copies of their KV and states.

A copy's label identifies it by the digest of its base and its own tokens. A state is useful if all its KV is there,
from the beginning on; KV is useful if such a state needs it."""

from collections.abc import Sequence as Listing

from tokenbus.worker.engine.kv.checkpoint_tree import Checkpoint
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel, RootName


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
    a tree yet; and the ids of useless copies, with the reason."""
    found = _Recovered(has_kv=has_kv)
    rejected: dict[int, str] = {}
    for copy_id, label in sorted(copies, key=lambda one: (one[1].is_state, one[1].start)):  # KV first, bases first
        if reason := found.take(copy_id, label):
            rejected[copy_id] = reason
    useful = {base for one in found.tokens if one.has_state for base in one.path()}
    rejected |= {one.kv_copy: "orphan" for one in found.tokens if one not in useful and one.kv_copy is not None}
    return [(one, tokens) for one, tokens in found.tokens.items() if one in useful], rejected
