"""An allocation: the KV memory of one running sequence.

Its tokens lie in shared blocks first, which the prefix tree knows, then in private ones:

    |-- shared --|-- shared --|-- private --|-- private --|
       path[0]      path[1]   ^ node.end                  ^ num_blocks

A block is private until it is complete; then others can find it. The sequence's lane carries all of it.
"""

from array import array

from tokenbus.protocol.wire import block_hash
from tokenbus.protocol.wire.block_hash import TOKEN_BYTES
from tokenbus.worker.engine.kv.checkpoint_tree import Checkpoint
from tokenbus.worker.engine.kv.checkpoints import Checkpoints
from tokenbus.worker.engine.kv.ops import Share, Truncate, Wipe
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache
from tokenbus.worker.engine.kv.prefix_tree import Block, Domain, Root
from tokenbus.worker.engine.kv.retention import NO_HINT, CacheHint

_CONTINUED_SHARE = 0.5
"""A prompt continues a cached one if at least this share of it was cached when it arrived."""
_GENERATION_PROMPT_TOKENS = 8
_INTERVAL_TOKENS = 2_048
_KEPT_STATES = 2
"""The number of last states kept where a client wants its prefix kept: the next turn continues from its end, or
from before the answer if the template writes that differently."""


class Allocation:
    """The shared and private blocks of a sequence. `root` is None if it neither uses nor leaves cached blocks."""

    def __init__(
        self, cache: PrefixCache, root: Root | None, *, is_new: bool = True, hint: CacheHint = NO_HINT
    ) -> None:
        self._cache = cache
        self._hint = hint
        self.root = root
        self.path: list[Block] = []
        self.num_private = 0
        self.stop: int | None = None
        """A position after the computed tokens at which a step of the prompt must end."""
        self._is_new = is_new
        self._num_returned = 0
        """Reused blocks that earlier sequences have used."""
        self._is_continued = False
        """Whether the prompt continues a cached one."""
        if root is not None:
            root.ref_count += 1  # before a lane is taken, which may evict everything below the root
        self.lane = cache.take_lane()

    def __repr__(self) -> str:
        return f"<Allocation on lane {self.lane}: {len(self.path)} shared, {self.num_private} private>"

    @property
    def node(self) -> Block:
        """The last shared block, or the root."""
        assert self.root is not None
        return self.path[-1] if self.path else self.root

    @property
    def num_blocks(self) -> int:
        return len(self.path) + self.num_private

    def next_block(self, token_ids: "array[int]") -> tuple[Block, bytes] | None:
        """Returns a key for the block that this sequence completes next, or None if it can't be shared. Sequences that
        compute the same block get equal keys."""
        is_shared = self.root is not None and len(token_ids) >= self._cache.min_prefix_tokens
        tokens = self._next_tokens(token_ids, len(token_ids)) if is_shared else None
        return None if tokens is None else (self.node, tokens)

    def awaits_onload(self, token_ids: "array[int]") -> bool:
        """Returns whether the next block, or the rest of the prompt but its last token, is in host memory and waits
        only for the step's onload budget."""
        if self.root is None or self._cache.host.can_onload or self.num_private > 1:
            return False
        wanted = self._next_reusable(token_ids, len(token_ids) - 1)
        found = self.node.longest_match(wanted)
        if found is None or len(wanted) > TOKEN_BYTES * found[1]:
            return False
        return not found[0].lanes and (not self.num_private or found[1] == self._cache.block_size)

    def allocate_blocks(self, num_tokens: int) -> bool:
        """Gets private blocks for `num_tokens` in total, evicting cached ones; without room, changes nothing and
        returns False."""
        needed = self._cache.num_blocks(num_tokens) - self.num_blocks
        if needed <= 0:
            return True
        if not self._cache.make_room(needed):
            return False
        self._add_private(needed)
        return True

    def reuse_prefix(self, token_ids: "array[int]", num_computed: int, most: int | None = None) -> int:
        """Reuses cached KV for a prefix of `token_ids` of at most `most` tokens, all but the last if that is None;
        returns how many tokens are then computed.

        At least one token is left to compute, since only computing gives logits."""
        if self.root is None or self._has_own_blocks(num_computed):
            return num_computed
        most = len(token_ids) - 1 if most is None else most
        self._reuse_blocks(token_ids, most)
        reused = self.node.end
        returned = self._num_returned * self._cache.block_size
        self._is_continued = self._is_new and returned >= _CONTINUED_SHARE * len(token_ids)
        if self.num_private == 0:
            reused += self._reuse_start_of_block(token_ids, most)
        return max(num_computed, reused)

    def cache_blocks(self, token_ids: "array[int]", num_computed: int) -> None:
        """Adds complete private blocks to the prefix tree. If another lane has an equal block, its cells are shared."""
        if self.root is None or num_computed < self._cache.min_prefix_tokens:
            return
        while (tokens := self._next_tokens(token_ids, num_computed)) is not None:
            self._add_private(-1)
            block = self.node.children.get(tokens)
            if block is None:
                block = self._cache.insert(self.node, tokens, self.lane)
            elif block.lanes:  # share the other lane's cells, so that the block is stored only once
                self._cache.ops.add(Truncate(self.lane, block.start, block.end))
                self._cache.ops.add(Share(block.any_lane, self.lane, block.start, block.end))
            self._use(block)
            self._cache.lanes.free_ending_at(block)

    def free(self, token_ids: "array[int]", num_computed: int) -> None:
        """Gives everything back; what was computed stays cached."""
        self._add_private(-self.num_private)
        partial = None if self.root is None else self._cache_partial_block(token_ids, num_computed)
        for block in self.path:
            block.was_used = True
            block.is_continued |= self._is_continued
        if self.root is not None:
            self._retain(self.path if partial is None else [*self.path, partial])
        for block in reversed(self.path):  # deepest first, so that no block is evicted before its descendants
            block.ref_count -= 1
            if not block.ref_count:
                self._cache.make_evictable(block)
        self._cache.lanes.retire(self.lane, self.path, partial)
        if self.root is not None:
            self.root.ref_count -= 1
            self._cache.tree.prune(self.root)

    def drop(self, *, trusts_others: bool) -> None:
        """Gives everything back; nothing that was computed becomes cached. Unless `trusts_others`, shared blocks that
        no other sequence uses are dropped too, with their descendants."""
        path = self.path
        self.free(array("I"), 0)
        if trusts_others or not path:
            return
        unused = next((block for block in path if not block.ref_count), None)
        if unused is not None:
            self._cache.forget(unused)
        self._cache.ops.add(Wipe())

    def _reuse_blocks(self, token_ids: "array[int]", most: int) -> None:
        """Reuses whole blocks that others have computed.

        Each next block of the prompt is one of these:

        - resident: a lane carries it, whose cells this lane shares;
        - offloaded: it is copied back from host memory to this lane;
        - half computed: this sequence has computed a part of it, which is dropped first;
        - evicted meanwhile: making room for its copy has pushed out that very copy, and matching ends.

            prompt   |---- A ----|---- B ----|---- C ----|-- rest --|
                       resident    resident    offloaded
            ops      Share(lane of B, own lane, A.start, B.end)  Onload(copy of C, own lane, C.start, C.end)
        """
        cache = self._cache
        shared_from = self.node.end
        source = None
        covered: list[Block] = []
        while (tokens := self._next_tokens(token_ids, most)) is not None:
            block = self.node.children.get(tokens)
            if block is None or not (block.lanes or cache.can_onload(block)):
                break
            if self.num_private:  # it has begun this block itself
                self._add_private(-self.num_private)
                cache.ops.add(Truncate(self.lane, self.node.end))
            if block.lanes:
                source = block.any_lane  # it carries all blocks before this one too: one op shares them all
                if block.end_lane is not None:
                    covered.append(block)
                self._take_over(block)
                continue
            # Share first: making room for the copy may empty the lane that is shared from.
            self._share(source, shared_from)
            source = None
            cache.host.touch(block)
            cache.make_room(1)
            if block.host_copy is None:  # evicted meanwhile
                break
            cache.host.onload(block, self.lane, block.end)
            self._take_over(block)
        self._share(source, shared_from)
        # Only now: the ops above share cells of these lanes.
        for block in covered:
            cache.lanes.free_ending_at(block)

    def _reuse_start_of_block(self, token_ids: "array[int]", most: int) -> int:
        """Reuses the first tokens of a block, full or partial, that begins like the prompt's next one:

            known    |-- a b c d --|
            prompt   |-- a b x y --|      a b are copied or shared into a private block

        Returns their number. One token of the prompt is left to compute."""
        cache = self._cache
        found = self.node.longest_match(self._next_reusable(token_ids, most))
        if found is None:
            return 0
        block, count = found
        if not block.lanes and not cache.can_onload(block):
            return 0
        was_evictable = cache.pin(block)  # it must not be evicted to make room for its own first tokens
        cache.host.touch(block)
        has_room = cache.make_room(1)
        if not has_room or not (block.lanes or block.host_copy is not None):
            count = 0  # no room, or making room has pushed the block's own copy out of host memory
        elif block.lanes:
            cache.ops.add(Share(block.any_lane, self.lane, block.start, block.start + count))
        else:
            cache.host.onload(block, self.lane, block.start + count)
        if count:
            self._add_private(1)
        if was_evictable:
            cache.make_evictable(block)
        return count

    def _has_own_blocks(self, num_computed: int) -> bool:
        """Whether whole blocks are private because what is computed is still too short to be cached. Once it is long
        enough, those that others have too are shared."""
        return num_computed - self.node.end >= self._cache.block_size

    def _cache_partial_block(self, token_ids: "array[int]", num_computed: int) -> Block | None:
        """Caches the tokens after the last full block; returns None if there are none, or they are known."""
        if num_computed <= max(self.node.end, self._cache.min_prefix_tokens - 1):
            return None
        tokens = block_hash.pack_token_ids(token_ids[self.node.end : num_computed])
        known = self.node.longest_match(tokens)
        if known is not None and known[1] == num_computed - self.node.end:  # another block begins with these tokens
            return None
        partial = self._cache.insert(self.node, tokens, self.lane)
        partial.was_used, partial.is_continued = True, self._is_continued
        self._cache.make_evictable(partial)
        return partial

    def _retain(self, path: list[Block]) -> None:
        """Notes whose blocks they are, and keeps them for as long as the request asks."""
        retention, (session, ttl_s) = self._cache.retention, self._hint
        retention.mark(path, session)
        if ttl_s and self.root is not None and self.root.domain is not None:
            retention.keep(self.root.domain.tenant, reversed(path), ttl_s)

    def _next_tokens(self, token_ids: "array[int]", num_tokens: int) -> bytes | None:
        """The tokens of the block after the shared ones; None if that block would extend beyond `num_tokens`."""
        start = self.path[-1].end if self.path else 0
        end = start + self._cache.block_size
        return block_hash.pack_token_ids(token_ids[start:end]) if end <= num_tokens else None

    def _next_reusable(self, token_ids: "array[int]", most: int) -> bytes:
        """Returns the tokens after the shared blocks that may be taken from a cached one: those before `most`."""
        start = self.node.end
        return block_hash.pack_token_ids(token_ids[start : min(start + self._cache.block_size, most)])

    def _add_private(self, count: int) -> None:
        """Takes free blocks, or gives them back if `count` is negative."""
        self.num_private += count
        self._cache.num_private += count

    def _use(self, block: Block) -> None:
        """Appends a block to the path: this lane carries it, or will after the ops."""
        self._cache.pin(block)
        self._cache.lanes.add(self.lane, block)
        block.ref_count += 1
        self.path.append(block)

    def _take_over(self, block: Block) -> None:
        """Appends a block that existed before this sequence needed it."""
        self._num_returned += block.was_used
        self._use(block)

    def _share(self, source: int | None, start: int) -> None:
        if source is not None:
            self._cache.ops.add(Share(source, self.lane, start, self.node.end))


class CheckpointedAllocation(Allocation):
    """The allocation of a model whose state can't be cut at a token: it reuses and leaves checkpoints, not blocks.

    All its blocks are private. Without a domain it has no checkpoints; with one, a prompt's step ends where one is due:

        - at the last end of a block that is at least 8 tokens before the prompt's end: in the next turn of a
          conversation, the prompt is followed by an answer, not by the generation prompt with which it ended;
        - where the prompt diverges from a known prefix, or from another prompt that is computed after it;
        - every 2,048 tokens.

    The end of the sequence itself is the last one, since the next turn continues there."""

    def __init__(
        self, cache: PrefixCache, checkpoints: Checkpoints, domain: Domain | None, hint: CacheHint = NO_HINT
    ) -> None:
        super().__init__(cache, None, hint=hint)
        self._checkpoints = checkpoints
        self._domain = domain
        self._last: Checkpoint | None = None
        """The deepest one that its lane continued from or was saved to."""
        self._used: list[Checkpoint] = []
        """All of these, in order."""

    def reuse_prefix(self, token_ids: "array[int]", num_computed: int, most: int | None = None) -> int:
        if self._domain is None:
            return num_computed
        most = len(token_ids) - 1 if most is None else most
        num_known, found = self._checkpoints.match(self._domain, token_ids, most)
        if found is not None and found.end > num_computed and self.allocate_blocks(found.end):
            if num_computed:
                self._cache.ops.truncate(self.lane, 0)
            self._checkpoints.restore(found, self.lane)
            self._last, num_computed = found, found.end
            self._used.append(found)
        self._set_stop(len(token_ids), num_known, num_computed)
        return num_computed

    def stop_for(self, token_ids: "array[int]", other: "array[int]", num_computed: int) -> int:
        """Makes a step end where another prompt of the same domain diverges from this one; returns that position."""
        size = self._cache.block_size
        if token_ids[:size] != other[:size]:  # the usual case
            return 0
        count = min(len(token_ids), len(other))
        one, two = block_hash.pack_token_ids(token_ids[:count]), block_hash.pack_token_ids(other[:count])
        position = self._last_boundary(min(block_hash.num_common_tokens(one, two), count - _GENERATION_PROMPT_TOKENS))
        if position < self._cache.min_prefix_tokens:
            return 0
        if position > num_computed and (self.stop is None or position < self.stop):
            self.stop = position
        return position

    def cache_blocks(self, token_ids: "array[int]", num_computed: int) -> None:
        if num_computed == self.stop:
            self.stop = None
            self._save(token_ids, num_computed)

    def free(self, token_ids: "array[int]", num_computed: int) -> None:
        if self._domain is not None and num_computed >= self._cache.min_prefix_tokens:
            _, known = self._checkpoints.match(self._domain, token_ids[:num_computed], num_computed)
            if num_computed - (0 if known is None else known.end) >= self._cache.block_size:
                self._save(token_ids, num_computed)
            self._retain_states(self._domain)
        super().free(token_ids, num_computed)

    def drop(self, *, trusts_others: bool) -> None:
        super().drop(trusts_others=trusts_others)
        if self._last is not None and not trusts_others:
            self._checkpoints.forget(self._last)
            self._cache.ops.add(Wipe())

    def _save(self, token_ids: "array[int]", num_computed: int) -> None:
        assert self._domain is not None
        saved = self._checkpoints.save(self._domain, token_ids, num_computed, self.lane, self._last)
        if saved is not None:
            self._last = saved
            self._used.append(saved)

    def _retain_states(self, domain: Domain) -> None:
        used = [one for one in self._used if one.has_state]
        retention, (session, ttl_s) = self._checkpoints.retention, self._hint
        retention.mark(used, session)
        if ttl_s:
            retention.keep(domain.tenant, used[-_KEPT_STATES:], ttl_s)

    def _set_stop(self, num_tokens: int, num_known: int, num_computed: int) -> None:
        """Finds the first position after `num_computed` at which a checkpoint is due."""
        last = num_tokens - _GENERATION_PROMPT_TOKENS
        interval = max(self._cache.block_size, self._last_boundary(_INTERVAL_TOKENS))
        stops = (
            self._last_boundary(last),
            self._last_boundary(min(num_known, last)),
            (num_computed // interval + 1) * interval,
        )
        first = max(num_computed + 1, self._cache.min_prefix_tokens)
        self.stop = min((stop for stop in stops if first <= stop <= last), default=None)

    def _last_boundary(self, position: int) -> int:
        """Returns the last block boundary up to a position."""
        return position // self._cache.block_size * self._cache.block_size
