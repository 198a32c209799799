"""An allocation for a model whose state can't be cut at a token: it reuses and leaves checkpoints instead of blocks.

All its blocks are private. A prompt's step ends where a checkpoint is due:

    - at the last end of a block that is at least 8 tokens before the prompt's end: in the next turn of a conversation,
      the prompt is followed by an answer, not by the generation prompt with which it ended;
    - where the prompt diverges from a known prefix, or from another prompt that is computed after it;
    - every 2,048 tokens.

The end of the sequence itself is the last one, since the next turn continues there.
"""

from array import array

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.allocation import Allocation
from tokenbus.worker.engine.kv.checkpoint_tree import Checkpoint
from tokenbus.worker.engine.kv.checkpoints import Checkpoints
from tokenbus.worker.engine.kv.ops import Wipe
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache
from tokenbus.worker.engine.kv.prefix_tree import Domain, num_common_tokens
from tokenbus.worker.engine.kv.retention import NO_HINT, CacheHint

_GENERATION_PROMPT_TOKENS = 8
_INTERVAL_TOKENS = 2_048
_KEPT_STATES = 2
"""The number of last states kept where a client wants its prefix kept: the next turn continues from its end, or
from before the answer if the template writes that differently."""


class CheckpointedAllocation(Allocation):
    """Private blocks, and the checkpoints of one sequence, which has none without a domain."""

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

    def reuse_prefix(self, token_ids: "array[int]", num_computed: int) -> int:
        if self._domain is None:
            return num_computed
        num_known, found = self._checkpoints.match(self._domain, token_ids, len(token_ids) - 1)
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
        position = self._last_boundary(min(num_common_tokens(one, two), count - _GENERATION_PROMPT_TOKENS))
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
