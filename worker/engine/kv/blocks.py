"""Counts KV memory in blocks: what sequences use and may still need, and what is kept of those that have ended.

    total_blocks
    |-------------------------------------------------------|
    |  used by sequences  |  idle: cached, nobody's  |  free  |
                          |<- promised, not used yet ->|

A sequence is started when everything it may ever need can be promised; what is promised and not used yet may be cached
blocks, which are evicted when it is needed. Blocks are shared: a sequence adopts what others have computed of its
prompt, whether they run or have ended. The pool decides; what the lanes of the device have to do for it are moves.

Invariants: a lane carries a whole path from its root, so that whoever holds a block holds all before it. An idle lane
ends at a block that no other lane carries. The least recently used idle block is one that no lane goes on behind.
"""

from array import array
from collections import Counter, OrderedDict
from typing import NamedTuple

from tokenbus.protocol.wire import blocks
from tokenbus.worker.engine.kv.moves import Cut, Forget, Move, Restore, Save, Share
from tokenbus.worker.engine.kv.tree import Block, Domain, PrefixTree, Root


class Stored(NamedTuple):
    """A block that is held from now on, and the one before it."""

    parent: int
    hash: int


class Changes(NamedTuple):
    """Which blocks came and went, in the order in which a router must apply them: `removed`, then `stored`."""

    removed: list[int]
    stored: list[Stored]


class _Holding:
    """What one sequence holds: a path of shared blocks, and behind it blocks of its own that nobody else sees yet."""

    __slots__ = ("lane", "max_blocks", "num_private", "path", "root")

    def __init__(self, root: Root | None, lane: int, max_blocks: int) -> None:
        self.root = root
        """None for a sequence that neither reads nor leaves cache."""
        self.lane = lane
        self.max_blocks = max_blocks
        self.path: list[Block] = []
        self.num_private = 0

    @property
    def node(self) -> Block:
        """The last shared block."""
        assert self.root is not None
        return self.path[-1] if self.path else self.root

    @property
    def num_blocks(self) -> int:
        return len(self.path) + self.num_private

    @property
    def bit(self) -> int:
        return 1 << self.lane


class BlockPool:
    """`total_blocks` of `block_size` tokens on the device, and copies of `host_blocks` in host memory.

    Sizes are in tokens unless they say blocks. `num_lanes` are the lanes that running and cached sequences share."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        num_lanes: int,
        *,
        fingerprint: str = "",
        can_share: bool = True,
        host_blocks: int = 0,
        overcommit: float = 1.0,
    ) -> None:
        assert total_blocks > 0, total_blocks
        assert block_size > 0, block_size
        assert overcommit >= 1, overcommit
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._promisable_blocks = int(total_blocks * overcommit)
        self._can_share = can_share
        self._host_blocks = host_blocks
        self._tree = PrefixTree(block_size, fingerprint)
        self._holdings: dict[int, _Holding] = {}
        self._free_lanes = list(reversed(range(num_lanes)))
        self._lane_ends: dict[int, Block] = {}
        """The last block of each idle lane."""
        self._num_lanes = num_lanes
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._saved: OrderedDict[Block, None] = OrderedDict()
        self._used_blocks = 0
        self._resident_blocks = 0
        """Shared blocks that a lane carries."""
        self._last_number = 0
        self._saves_left = 0
        self._restores_left = 0
        self._moves: list[Move] = []
        self._stored: dict[int, Stored] = {}
        self._removed: list[int] = []
        self.evicted_blocks = 0
        """Blocks that had to go from the device, in all."""

    def __repr__(self) -> str:
        kept = f"{len(self._idle)} idle, {len(self._saved)} saved"
        return f"<BlockPool {self._used_blocks} used, {self.reserved_blocks} promised, {kept} of {self.total_blocks}>"

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences use, each counted once."""
        return self._used_blocks

    @property
    def idle_blocks(self) -> int:
        """Cached blocks on the device that no sequence uses."""
        return len(self._idle)

    @property
    def saved_blocks(self) -> int:
        """Copies in host memory."""
        return len(self._saved)

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self._used_blocks - len(self._idle)

    @property
    def reserved_blocks(self) -> int:
        """What has been promised and is not used yet."""
        return sum(holding.max_blocks - holding.num_blocks for holding in self._holdings.values())

    def lane_of(self, seq_no: int) -> int:
        return self._holdings[seq_no].lane

    def can_ever_promise(self, num_tokens: int) -> bool:
        return self._blocks(num_tokens) <= self.total_blocks

    def can_promise(self, domain: Domain | None, token_ids: "array[int]", max_tokens: int, *, fully: bool) -> bool:
        """Whether a sequence can be started: `fully` says that no over-commitment may be used for it."""
        path = self._resident_path(domain, token_ids)
        wakes = sum(block.refs == 0 for block in path)
        needed = self._used_blocks + wakes + self.reserved_blocks + self._blocks(max_tokens) - len(path)
        return needed <= (self.total_blocks if fully else self._promisable_blocks)

    def begin(self, seq_no: int, domain: Domain | None, max_tokens: int) -> int:
        """Promises room for `max_tokens` to a sequence and gives it an empty lane, which is returned.

        Without a domain it neither reads nor leaves cache."""
        assert seq_no not in self._holdings, seq_no
        root = self._tree.root(domain) if domain is not None and self._can_share else None
        if root is not None:
            root.refs += 1
        lane = self._take_lane()
        self._holdings[seq_no] = _Holding(root, lane, self._blocks(max_tokens))
        return lane

    def adopt(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> int:
        """Takes what others have computed of a sequence's tokens; returns how many of them it holds then.

        At least one token is left to be computed, since only that gives logits."""
        holding = self._holdings[seq_no]
        if holding.root is None:
            return num_computed
        adopted = self._adopt_blocks(holding, token_ids)
        if holding.num_private == 0:
            adopted = max(adopted, self._adopt_beginning(holding, token_ids))
        return max(num_computed, adopted)

    def next_block(self, seq_no: int, token_ids: "array[int]") -> tuple[Block, bytes] | None:
        """Which block a sequence will complete next, if it could be shared: equal for two that compute the same."""
        holding = self._holdings[seq_no]
        if holding.root is None or holding.node.end + self.block_size > len(token_ids):
            return None
        return holding.node, self._tokens(token_ids, holding.node.end)

    def awaits_copy(self, seq_no: int, token_ids: "array[int]") -> bool:
        """Whether the next block of a sequence is in host memory, and only the time to fetch it was missing."""
        holding = self._holdings[seq_no]
        if holding.root is None or self._restores_left > 0:
            return False
        if holding.node.end + self.block_size >= len(token_ids):
            return False
        block = holding.node.children.get(self._tokens(token_ids, holding.node.end))
        return block is not None and not block.is_resident

    def append(self, seq_no: int, num_tokens: int) -> bool:
        """Has a sequence hold blocks for `num_tokens`, evicting cached ones; False, and no change, without room."""
        holding = self._holdings[seq_no]
        needed = self._blocks(num_tokens) - holding.num_blocks
        assert holding.num_blocks + max(needed, 0) <= holding.max_blocks, (seq_no, num_tokens)
        if needed > self.free_blocks + len(self._idle):
            return False
        for _ in range(needed):
            self._take_block()
            holding.num_private += 1
            self._used_blocks += 1
        return True

    def commit(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> None:
        """Shows others the blocks that a sequence has completed."""
        holding = self._holdings[seq_no]
        if holding.root is None:
            return
        while holding.node.end + self.block_size <= num_computed:
            self._complete(holding, self._tokens(token_ids, holding.node.end))

    def release(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> None:
        """Takes everything back from a sequence; what it has computed stays cached until it is evicted."""
        holding = self._holdings.pop(seq_no)
        self._used_blocks -= holding.num_private
        tail = self._leave_tail(holding, token_ids, num_computed)
        for block in reversed(holding.path):
            block.refs -= 1
            if not block.refs:
                self._used_blocks -= 1
                self._rest(block)
        self._leave_lane(holding, tail)
        if holding.root is not None:
            holding.root.refs -= 1
            self._tree.prune(holding.root)

    def allow(self, saves: int, restores: int) -> None:
        """Sets how many blocks may go to host memory and come back until this is called again."""
        self._saves_left, self._restores_left = saves, restores

    def keep_idle(self, most: int) -> None:
        """Evicts the least recently used idle blocks beyond `most`, as far as there is time to save them."""
        while len(self._idle) > most and (self._saves_left > 0 or not self._host_blocks):
            self._evict(next(iter(self._idle)))

    def clear(self) -> None:
        """Forgets everything that no sequence uses."""
        self._saves_left = 0
        while self._saved:
            self._unsave(next(iter(self._saved)))
        while self._idle:
            self._evict(next(iter(self._idle)))

    def take_moves(self) -> list[Move]:
        """What the lanes have to do before the next step, in order; only once."""
        moves, self._moves = self._moves, []
        return moves

    def take_changes(self) -> Changes:
        """Which blocks came and went since the last time."""
        changes = Changes(self._removed, list(self._stored.values()))
        self._removed, self._stored = [], {}
        return changes

    def check_counts(self) -> None:
        """Asserts what counters and lanes say of each other; looks at each lane once and at no other block."""
        used = {holding.lane for holding in self._holdings.values()}
        assert len(used) == len(self._holdings)
        assert sorted([*used, *self._lane_ends, *self._free_lanes]) == list(range(self._num_lanes)), self
        for lane, block in self._lane_ends.items():
            assert (block.end_lane, block.lanes, block.refs) == (lane, 1 << lane, 0), block
            assert block in self._idle, block
        for holding in self._holdings.values():
            assert 0 <= holding.num_private <= holding.num_blocks <= holding.max_blocks
            assert not holding.path or holding.path[-1].lanes & holding.bit, holding.path[-1]
        private = sum(holding.num_private for holding in self._holdings.values())
        assert self._used_blocks - private + len(self._idle) == self._resident_blocks, self
        assert self._holdings or not self._used_blocks, self
        assert self.free_blocks >= 0, self
        assert len(self._saved) <= self._host_blocks

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls; looks at every block."""
        self.check_counts()
        everything = list(self._tree.everything())
        resident = {block for block in everything if block.is_resident}
        assert len(resident) == self._resident_blocks
        in_use = {block for holding in self._holdings.values() for block in holding.path}
        assert resident == in_use | set(self._idle)
        assert not in_use & set(self._idle)
        assert self._used_blocks == len(in_use) + sum(holding.num_private for holding in self._holdings.values())
        assert set(self._saved) == {block for block in everything if block.saved is not None}
        self._check_lanes(everything)
        seen: set[Block] = set()
        for block in self._idle:
            assert not any(child.is_resident and child not in seen for child in block.children.values()), block
            seen.add(block)
        for block in everything:
            assert block.is_resident or block.saved is not None, block
            assert block.parent is not None
            assert block.start == block.parent.end
            assert self._tree.is_full(block) or not block.children

    def _check_lanes(self, everything: list[Block]) -> None:
        """The lanes and sequences that a block says it has are those whose paths it lies on."""
        assert self._lane_ends == {block.end_lane: block for block in everything if block.end_lane is not None}
        refs = Counter(block for holding in self._holdings.values() for block in holding.path)
        lanes = Counter[Block]()
        for holding in self._holdings.values():
            assert len(set(holding.path)) == len(holding.path)
            lanes.update(dict.fromkeys(holding.path, holding.bit))
        for lane, end in self._lane_ends.items():
            lanes.update(dict.fromkeys(end.path(), 1 << lane))
        for block in everything:
            assert (block.refs, block.lanes) == (refs[block], lanes[block]), block

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _tokens(self, token_ids: "array[int]", start: int, end: int | None = None) -> bytes:
        return blocks.to_bytes(token_ids[start : start + self.block_size if end is None else end])

    def _resident_path(self, domain: Domain | None, token_ids: "array[int]") -> list[Block]:
        if domain is None or not self._can_share:
            return []
        path: list[Block] = []
        root = self._tree.root(domain)
        block: Block | None = root
        while block is not None and block.end + self.block_size < len(token_ids):
            block = block.children.get(self._tokens(token_ids, block.end))
            if block is None or not block.is_resident:
                break
            path.append(block)
        self._tree.prune(root)
        return path

    # adopting

    def _adopt_blocks(self, holding: _Holding, token_ids: "array[int]") -> int:
        shared_from = holding.node.end
        source = None
        passed_lanes: list[Block] = []
        while holding.node.end + self.block_size < len(token_ids):
            block = holding.node.children.get(self._tokens(token_ids, holding.node.end))
            if block is None or not (block.is_resident or self._can_restore(block)):
                break
            self._give_up_private(holding)
            if block.is_resident:
                source = block.a_lane
                passed_lanes += [block] if block.end_lane is not None else []
                self._hold(holding, block)
            else:
                self._share(holding, source, shared_from)
                source = None
                if not self._bring_back(holding, block):
                    break
        self._share(holding, source, shared_from)
        for block in passed_lanes:
            self._free_lane_of(block)
        return holding.node.end

    def _share(self, holding: _Holding, source: int | None, start: int) -> None:
        if source is not None:
            self._moves.append(Share(source, holding.lane, start, holding.node.end))

    def _hold(self, holding: _Holding, block: Block) -> None:
        """Has a sequence use a block that a lane carries."""
        if not block.refs:
            del self._idle[block]
            self._used_blocks += 1
        block.refs += 1
        block.lanes |= holding.bit
        holding.path.append(block)

    def _give_up_private(self, holding: _Holding) -> None:
        """The block that a sequence has begun by itself is there, whole, from another."""
        if holding.num_private:
            self._used_blocks -= holding.num_private
            holding.num_private = 0
            self._moves.append(Cut(holding.lane, holding.node.end))

    def _can_restore(self, block: Block) -> bool:
        return block.saved is not None and self._restores_left > 0 and self.free_blocks + len(self._idle) > 0

    def _bring_back(self, holding: _Holding, block: Block) -> bool:
        """Has a sequence use a block of which there is only a copy in host memory."""
        self._saved.move_to_end(block)
        self._take_block()
        if block.saved is None:  # pushed out by the copy of what was evicted for it
            return False
        self._restores_left -= 1
        self._moves.append(Restore(block.saved, holding.lane, block.start, block.end))
        self._used_blocks += 1
        self._carry(holding, block)
        return True

    def _carry(self, holding: _Holding, block: Block) -> None:
        """Has a sequence use a block that only its own lane carries from now on."""
        block.refs = 1
        block.lanes = holding.bit
        self._resident_blocks += 1
        holding.path.append(block)

    def _adopt_beginning(self, holding: _Holding, token_ids: "array[int]") -> int:
        """Takes the beginning of a block or tail that then goes on differently; where it does, cells are shared too."""
        node = holding.node
        wanted = self._tokens(token_ids, node.end, min(node.end + self.block_size, len(token_ids) - 1))
        found = node.nearest(wanted)
        if found is None or holding.num_blocks == holding.max_blocks:
            return node.end
        block, count = found
        if not block.is_resident and not self._can_restore(block):
            return node.end
        was_idle = self._idle.pop(block, 1) is None  # not to be evicted for its own beginning
        is_taken = False
        if self.free_blocks - was_idle + len(self._idle) > 0:
            is_taken = self._take_beginning(holding, block, count, int(was_idle))
        if was_idle:
            self._idle[block] = None
        return node.end + count if is_taken else node.end

    def _take_beginning(self, holding: _Holding, block: Block, count: int, held_back: int) -> bool:
        end = block.start + count
        if block.saved is not None:
            self._saved.move_to_end(block)
        while self.free_blocks - held_back < 1:
            self._evict(next(iter(self._idle)))
        if not block.is_resident and block.saved is None:
            return False
        if block.is_resident:
            self._moves.append(Share(block.a_lane, holding.lane, block.start, end))
        else:
            assert block.saved is not None
            self._restores_left -= 1
            self._moves.append(Restore(block.saved, holding.lane, block.start, end))
        holding.num_private = 1
        self._used_blocks += 1
        return True

    # completing

    def _complete(self, holding: _Holding, tokens: bytes) -> None:
        """A block of its own becomes one that all can see, or gives way to an equal one that was there first."""
        node = holding.node
        block = node.children.get(tokens)
        holding.num_private -= 1
        if block is not None and block.is_resident:
            self._moves.append(Cut(holding.lane, block.start, block.end))
            self._moves.append(Share(block.a_lane, holding.lane, block.start, block.end))
            self._used_blocks -= 1
            passed = block.end_lane is not None
            self._hold(holding, block)
            if passed:
                self._free_lane_of(block)
            return
        if block is None:
            for tail in node.prefixes_of(tokens):
                self._discard(tail)
            block = self._tree.child(node, tokens)
            self._stored[block.hash] = Stored(node.hash, block.hash)
        self._carry(holding, block)

    # leaving

    def _leave_tail(self, holding: _Holding, token_ids: "array[int]", num_computed: int) -> Block | None:
        """Keeps what a sequence has computed of a block that is not full; None where that is nothing, or known."""
        if holding.root is None or num_computed <= holding.node.end:
            return None
        node = holding.node
        tokens = self._tokens(token_ids, node.end, num_computed)
        nearest = node.nearest(tokens)
        if nearest is not None and nearest[1] == num_computed - node.end:
            return None
        for shorter in node.prefixes_of(tokens):
            self._discard(shorter)
        tail = self._tree.child(node, tokens)
        tail.lanes = holding.bit
        self._resident_blocks += 1
        self._idle[tail] = None
        return tail

    def _leave_lane(self, holding: _Holding, tail: Block | None) -> None:
        """A lane becomes one that carries cached blocks, if they are not carried by others."""
        last = tail or (holding.path[-1] if holding.path else None)
        if last is not None and last.lanes == holding.bit:
            self._end_lane(last, holding.lane)
            if tail is None:
                self._moves.append(Cut(holding.lane, last.end))
            return
        for block in holding.path:
            block.lanes &= ~holding.bit
        self._free(holding.lane)

    def _rest(self, block: Block) -> None:
        """Nobody uses a block any more. Called deepest first, so that the least recently used one is never a parent."""
        self._idle[block] = None
        if block.saved is not None:
            self._saved.move_to_end(block)

    # evicting

    def _take_block(self) -> None:
        """Sees to it that one block is free."""
        if self.free_blocks < 1:
            self._evict(next(iter(self._idle)))

    def _take_lane(self) -> int:
        if not self._free_lanes:
            block = next(iter(self._idle))
            while not self._free_lanes:
                before = block.parent
                self._evict(block)
                assert before is not None
                block = before
        return self._free_lanes.pop()

    def _evict(self, block: Block) -> None:
        """Has an idle block leave the device, for host memory if there is room and time, else for good."""
        lane = block.end_lane
        assert lane is not None, block
        if block.saved is None and self._host_blocks and self._saves_left > 0:
            self._save(block, lane)
        self._take_off(block, lane)
        self.evicted_blocks += 1
        if block.saved is None:
            self._remove(block)

    def _discard(self, tail: Block) -> None:
        """Lets a tail go whose tokens are the beginning of another child's."""
        if tail.saved is not None:
            del self._saved[tail]
            self._moves.append(Forget(tail.saved))
            tail.saved = None
        if tail.end_lane is not None:
            self._take_off(tail, tail.end_lane)
        self._remove(tail)

    def _take_off(self, block: Block, lane: int) -> None:
        """The idle lane that ends at a block ends before it from now on; it is free if others carry the rest."""
        del self._idle[block], self._lane_ends[lane]
        block.lanes, block.end_lane = 0, None
        self._resident_blocks -= 1
        before = block.parent
        assert before is not None
        if before.lanes == 1 << lane:
            self._end_lane(before, lane)
            self._cut(lane, block.start)
            return
        for carried in before.path():
            carried.lanes &= ~(1 << lane)
        self._free(lane)

    def _free_lane_of(self, block: Block) -> None:
        """Frees the idle lane that ends at a block which another lane carries too."""
        lane = block.end_lane
        assert lane is not None, block
        block.end_lane = None
        del self._lane_ends[lane]
        for carried in block.path():
            carried.lanes &= ~(1 << lane)
        self._free(lane)

    def _end_lane(self, block: Block, lane: int) -> None:
        """An idle lane carries nothing beyond a block."""
        block.end_lane = lane
        self._lane_ends[lane] = block

    def _free(self, lane: int) -> None:
        self._cut(lane, 0)
        self._free_lanes.append(lane)

    def _cut(self, lane: int, start: int) -> None:
        last = self._moves[-1] if self._moves else None
        if isinstance(last, Cut) and last.lane == lane and last.end is None:
            self._moves.pop()
        self._moves.append(Cut(lane, start))

    def _remove(self, block: Block) -> None:
        """A block that is nowhere any more, and with it the copies of what came behind it."""
        for behind in block.below():
            self._forget_copy(behind)
            self._unlink(behind)
        self._unlink(block)

    def _unlink(self, block: Block) -> None:
        assert block.parent is not None
        block.parent.drop(block)
        if self._tree.is_full(block) and self._stored.pop(block.hash, None) is None:
            self._removed.append(block.hash)
        if isinstance(block.parent, Root):
            self._tree.prune(block.parent)

    # host memory

    def _save(self, block: Block, lane: int) -> None:
        while len(self._saved) >= self._host_blocks:
            self._unsave(next(iter(self._saved)))
        self._saves_left -= 1
        self._last_number += 1
        block.saved = self._last_number
        self._saved[block] = None
        pending = None
        if self._moves and isinstance(self._moves[-1], Cut) and self._moves[-1].lane == lane:
            pending = self._moves.pop()  # saved first, cut once
        self._moves.append(Save(block.saved, lane, block.start, block.end))
        if pending is not None:
            self._moves.append(pending)

    def _unsave(self, block: Block) -> None:
        """Lets the oldest copy go; where it was all there was, the block goes, and what came behind it."""
        self._forget_copy(block)
        if not block.is_resident:
            self._remove(block)

    def _forget_copy(self, block: Block) -> None:
        assert block.saved is not None, block
        del self._saved[block]
        self._moves.append(Forget(block.saved))
        block.saved = None
