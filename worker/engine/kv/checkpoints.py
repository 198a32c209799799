"""Checkpoints: prefix reuse for models whose state can't be cut at a token (decision 0061).

A sliding window and a recurrent layer keep only what the next token needs: their state at position 500 says nothing
about that at 400. So a prefix can be reused only where this *partial state* was copied while a lane stood there. The
keys and values of layers that attend to all tokens are copied too, each checkpoint holding those after the previous
one:

    tokens      |------ 160 ------|------ 512 ------|-- 28 --|
    kv copies   |-- of A: 0-160 --|- of B: 160-672 -|  of C  |
    states                        A                 B        C

To continue from C, a lane gets the KV of A, B and C and the state of C. Everything is copied, in both directions, and
no two lanes share anything: none can change another, and what is cached takes no room on the device.

When memory is needed, the least recently used state goes first; those that clients have asked to keep go last
(retention.py). Its KV goes with it, unless a later checkpoint builds on it: of a long conversation only the last states
stay, and all of the KV.
"""

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Listing

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.engine.kv import checkpoint_tree, prefix_tree
from tokenbus.worker.engine.kv.checkpoint_tree import Checkpoint, CheckpointMatch, TokenRun, recovered_checkpoints
from tokenbus.worker.engine.kv.ops import Discard, Offload, Onload, OpQueue, RestoreState, SaveState
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel, BlockNames, Domain, KvEvents, RootName
from tokenbus.worker.engine.kv.retention import DEFAULT_LIMITS, Retention, RetentionLimits, SessionKey


class Checkpoints:
    """The checkpoints of one engine: at most `max_count`, of the given sizes. KV ops say what is copied."""

    def __init__(
        self,
        sizes: CheckpointSizes,
        block_size: int,
        max_count: int,
        ops: OpQueue,
        fingerprint: str = "",
        limits: RetentionLimits = DEFAULT_LIMITS,
    ) -> None:
        self._sizes = sizes
        self._block_size = block_size
        self._max_count = max_count
        self._ops = ops
        self._fingerprint = fingerprint
        self._roots: dict[RootName, TokenRun] = {}
        """The trees of domains that have a checkpoint: clients can invent any number of domains."""
        self._states: OrderedDict[Checkpoint, None] = OrderedDict()
        """Checkpoints with a state, the least recently used first."""
        self.retention: Retention[Checkpoint] = Retention(
            sizes.budget_bytes, limits, self._num_bytes, self._states.move_to_end
        )
        self._copy_ids = itertools.count(1)
        self._labels: dict[int, BlockLabel] = {}
        """The labels of the copies made since the labels were last taken, by copy id."""
        self._names = BlockNames()
        """The hashes of the blocks that end at a checkpoint."""
        self.used_bytes = 0
        self.saved = 0
        """Checkpoints made, in total."""
        self.restored = 0
        """The number of times a lane continued from one."""
        self.evicted = 0
        """States discarded to make room."""

    def __repr__(self) -> str:
        return f"<Checkpoints {len(self)} in {self.used_bytes} of {self._sizes.budget_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._states)

    def match(self, domain: Domain, token_ids: "array[int]", max_tokens: int) -> CheckpointMatch:
        """Returns how much of a prefix is known, and the deepest checkpoint within its first `max_tokens` tokens."""
        root = self._roots.get(self._root_name(domain))
        if root is None:
            return CheckpointMatch(0, None)
        return checkpoint_tree.match(root, block_hash.pack_token_ids(token_ids), max_tokens)

    def restore(self, checkpoint: Checkpoint, lane: int) -> None:
        """Makes an empty lane continue from a checkpoint."""
        assert checkpoint.state_copy is not None, checkpoint
        self._states.move_to_end(checkpoint)
        self.restored += 1
        for one in checkpoint.path():
            if one.kv_copy is not None:
                self._ops.add(Onload(one.kv_copy, lane, one.start, one.end))
        self._ops.add(RestoreState(checkpoint.state_copy, lane))

    def save(
        self, domain: Domain, token_ids: "array[int]", end: int, lane: int, base: Checkpoint | None
    ) -> Checkpoint | None:
        """Makes a checkpoint of a lane that has computed exactly the first `end` tokens; returns None without room.

        `base` is one that the lane continued from or was saved to."""
        tokens = block_hash.pack_token_ids(token_ids[:end])
        name = self._root_name(domain)
        root = self._roots.setdefault(name, TokenRun(None, b""))
        found = checkpoint_tree.match(root, tokens, end).checkpoint
        if found is not None and found.end == end:
            self._states.move_to_end(found)
            return found
        node = checkpoint_tree.insert(root, tokens)
        one = node.checkpoint
        if one is None:
            one = node.checkpoint = Checkpoint(name, self._surviving(base), node, tokens)
            if one.base is not None:
                one.base.num_dependents += 1
        one.num_dependents += 1  # making room must not take its base
        num_kv_bytes = 0 if one.kv_copy is not None else self._sizes.kv_bytes(end - one.start)
        num_state_bytes = self._sizes.state_copy_bytes(end - one.start)
        has_room = self._make_room(num_state_bytes + num_kv_bytes)
        one.num_dependents -= 1
        if not has_room:
            self._collect(one)
            return None
        if num_kv_bytes:
            one.kv_copy = next(self._copy_ids)
            self._labels[one.kv_copy] = one.kv_label(tokens)
            self._ops.add(Offload(one.kv_copy, lane, one.start, end))
        one.state_copy = next(self._copy_ids)
        self._labels[one.state_copy] = one.state_label(tokens, has_kv=self._has_kv)
        self._ops.add(SaveState(one.state_copy, lane))
        self._states[one] = None
        self.used_bytes += num_state_bytes + num_kv_bytes
        self.saved += 1
        self._announce(one, tokens)
        return one

    @property
    def has_unsaved(self) -> bool:
        """Whether there are copies that ops have yet to make."""
        return bool(self._labels)

    def take_labels(self) -> list[tuple[int, BlockLabel]]:
        """Returns the ids and labels of the copies made since the last call that are still wanted."""
        labels, self._labels = self._labels, {}
        return list(labels.items())

    def recover(self, copies: Listing[tuple[int, BlockLabel]]) -> dict[int, str]:
        """Adopts copies that an earlier engine made, given by id and in the order in which they were made.

        Returns the ids of those that are not kept, with the reason."""
        found, rejected = recovered_checkpoints(copies, has_kv=self._has_kv)
        ages = {copy_id: age for age, (copy_id, _) in enumerate(copies)}
        for one, tokens in found:
            one.node = checkpoint_tree.insert(self._roots.setdefault(one.root, TokenRun(None, b"")), tokens)
            one.node.checkpoint = one
            if one.base is not None:
                one.base.num_dependents += 1
            if one.kv_copy is not None:
                self.used_bytes += self._sizes.kv_bytes(one.end - one.start)
        with_state = [(one, tokens) for one, tokens in found if one.state_copy is not None]
        for one, tokens in sorted(with_state, key=lambda pair: ages[pair[0].state_copy or 0]):
            self._states[one] = None
            self.used_bytes += self._sizes.state_copy_bytes(one.end - one.start)
            self._announce(one, tokens)
        self._copy_ids = itertools.count(max(ages, default=0) + 1)
        while len(self) > self._max_count or self.used_bytes > self._sizes.budget_bytes:
            self._drop_state(next(iter(self._states)))
        return rejected

    def end_session(self, session: SessionKey) -> None:
        """Makes the states that a session alone has used the first to be discarded."""
        for one in self.retention.of_session(session):
            self.retention.release(one)
            self._states.move_to_end(one, last=False)

    def keep_session(self, session: SessionKey, ttl_s: float) -> None:
        """Keeps the states that a session alone has used, the last one longest."""
        owned = sorted(self.retention.of_session(session), key=lambda one: one.end)
        self.retention.keep(session[0], owned, ttl_s)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Discards a checkpoint, and all that share part of its KV."""
        first = checkpoint.path()[0]
        for one in [one for one in self._states if one.path()[0] is first]:
            self._drop_state(one)

    def clear(self) -> None:
        """Discards everything."""
        while self._states:
            self._drop_state(next(iter(self._states)))

    def take_events(self) -> KvEvents:
        """Returns the blocks that have begun or ceased to end at a checkpoint since the last call."""
        return self._names.take_events()

    def all(self) -> Iterator[Checkpoint]:
        """Yields every checkpoint, including those without a state."""
        nodes = list(self._roots.values())
        for node in nodes:  # grows during the iteration
            nodes.extend(node.children.values())
            if node.checkpoint is not None:
                yield node.checkpoint

    def check_counts(self) -> None:
        assert len(self) <= self._max_count, self
        assert 0 <= self.used_bytes <= self._sizes.budget_bytes, self

    def check_integrity(self) -> None:
        """Asserts that everything kept is useful, has its base kept, and is counted."""
        self.check_counts()
        kept = list(self.all())
        assert self._roots.keys() == {one.root for one in kept}, self._roots
        dependents = dict.fromkeys(kept, 0)
        used_bytes = 0
        for one in kept:
            assert one.node is not None, one
            assert one.node.checkpoint is one, one
            assert one.start == (0 if one.base is None else one.base.end) < one.end, one
            assert (one.kv_copy is not None) == self._has_kv, one
            size = one.end - one.start
            used_bytes += self._sizes.kv_bytes(size) + one.has_state * self._sizes.state_copy_bytes(size)
            if one.base is not None:
                dependents[one.base] += 1
        assert all(one.num_dependents == count for one, count in dependents.items()), dependents
        assert all(one.has_state or one.num_dependents for one in kept), kept
        assert used_bytes == self.used_bytes, (used_bytes, self)
        assert {one for one in kept if one.has_state} == set(self._states)
        copies = [copy for one in kept for copy in (one.kv_copy, one.state_copy) if copy is not None]
        assert len(copies) == len(set(copies)), copies
        self.retention.check_integrity(self._states)

    def _surviving(self, base: Checkpoint | None) -> Checkpoint | None:
        """Returns the last checkpoint up to `base` whose KV still exists; None if tokens have no KV."""
        while base is not None and base.node is None:
            base = base.base
        return base if self._has_kv else None

    @property
    def _has_kv(self) -> bool:
        return self._sizes.token_bytes > 0

    def _root_name(self, domain: Domain) -> RootName:
        return prefix_tree.root_name(domain, self._fingerprint)

    def _num_bytes(self, one: Checkpoint) -> int:
        """Returns the memory that a checkpoint takes in addition to its bases."""
        return self._sizes.state_copy_bytes(one.end - one.start) + self._sizes.kv_bytes(one.end - one.start)

    def _make_room(self, num_bytes: int) -> bool:
        """Discards states, and KV that only they need, until there is room for one more checkpoint of that size."""
        if num_bytes > self._sizes.budget_bytes:
            return False
        while self.used_bytes + num_bytes > self._sizes.budget_bytes or len(self) >= self._max_count:
            if not self._states:
                return False
            self._drop_state(next((one for one in self._states if not one.kept_until), next(iter(self._states))))
            self.evicted += 1
        return True

    def _drop_state(self, one: Checkpoint) -> None:
        assert one.state_copy is not None, one
        del self._states[one]
        self.retention.forget(one)
        self._discard(one.state_copy)
        one.state_copy = None
        self.used_bytes -= self._sizes.state_copy_bytes(one.end - one.start)
        if one.hash is not None:
            self._names.remove(one.hash)
        self._collect(one)

    def _collect(self, checkpoint: Checkpoint) -> None:
        """Discards a useless checkpoint, and any bases that then become useless."""
        one: Checkpoint | None = checkpoint
        while one is not None and not one.has_state and not one.num_dependents:
            if one.kv_copy is not None:
                self._discard(one.kv_copy)
                self.used_bytes -= self._sizes.kv_bytes(one.end - one.start)
            assert one.node is not None, one
            checkpoint_tree.remove(one.node)
            if not self._roots[one.root].children:
                del self._roots[one.root]
            one.node = one.kv_copy = None
            one = one.base
            if one is not None:
                one.num_dependents -= 1

    def _discard(self, copy_id: int) -> None:
        self._labels.pop(copy_id, None)
        self._ops.add(Discard(copy_id))

    def _announce(self, one: Checkpoint, tokens: bytes) -> None:
        """Notes the hash of the block that ends at a checkpoint, for routers."""
        if one.end % self._block_size:
            return
        parent = one.root.hash
        hashes = [parent, *block_hash.block_hashes_of_bytes(tokens, self._block_size, parent)]
        one.hash = hashes[-1]
        self._names.add(hashes[-2], one.hash)
