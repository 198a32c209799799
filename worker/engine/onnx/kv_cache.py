"""The interface of both kinds of cache, which keep the tokens of all lanes and compute new ones after them; how lanes
are changed and saved, and how many may be held."""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

import numpy as np

from tokenbus.worker.engine.device import non_finite
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.ledger import KvUsage
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate, Wipe
from tokenbus.worker.engine.onnx.graph import Array, KvTensor
from tokenbus.worker.engine.onnx.session import NO_ADAPTERS, AdapterInputs
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens
from tokenbus.worker.files import number_types

_NUMBER_TYPES = {"float32": number_types.F32, "float16": number_types.F16}


class Copy(NamedTuple):
    """Lane `to`, which holds `start` tokens, gets those up to `end` from lane `lane`."""

    lane: int
    to: int
    start: int
    end: int


class LaneTransfer(NamedTuple):
    """Lane `to`, which is empty, gets the memory of lane `lane` and its first `end` tokens; `lane` is then empty."""

    lane: int
    to: int
    end: int


class Shrink(NamedTuple):
    """A lane keeps only its first `end` tokens."""

    lane: int
    end: int


LaneChange = Copy | LaneTransfer | Shrink
HostMove = Offload | Onload | Discard
"""Changes that involve copies in host memory."""


class LaneLengths:
    """The lengths of all lanes in tokens, and what the block pool's operations change in them.

    The pool assumes that lanes can share memory. Here each lane has its own, so sharing means copying, unless the
    sharing lane is emptied right after: then its memory changes hands. Tokens that a lane already holds are never
    copied."""

    def __init__(self, num_lanes: int) -> None:
        self.lengths = [0] * num_lanes

    def __repr__(self) -> str:
        return f"<LaneLengths {sum(map(bool, self.lengths))} of {len(self.lengths)} hold {sum(self.lengths)} tokens>"

    def grow(self, lane: int, start: int, end: int) -> None:
        """Records that the tokens `start` to `end` of a lane were computed."""
        assert start <= self.lengths[lane], (self.lengths[lane], start)
        self.lengths[lane] = end

    def resolve(self, kv_ops: Listing[KvOp]) -> list[LaneChange | HostMove]:
        """Returns the changes that the operations amount to, in order. The lengths are updated as if they were done."""
        found: list[LaneChange | HostMove] = []
        for place, op in enumerate(kv_ops):
            match op:
                case Share(lane, to, start, end) if end > self.lengths[to]:
                    assert start == self.lengths[to], (op, self.lengths)
                    assert end <= self.lengths[lane], (op, self.lengths)
                    self.lengths[to] = end
                    if start == 0 and _empties_next(kv_ops[place + 1 :], lane):
                        self.lengths[lane] = 0
                        found.append(LaneTransfer(lane, to, end))
                    else:
                        found.append(Copy(lane, to, start, end))
                case Truncate(lane, start, None) if start < self.lengths[lane]:
                    self.lengths[lane] = start
                    found.append(Shrink(lane, start))
                case Offload(_, lane, _, end):
                    assert end <= self.lengths[lane], (op, self.lengths)
                    found.append(op)
                case Onload(_, lane, start, end) if end > self.lengths[lane]:
                    assert start == self.lengths[lane], (op, self.lengths)
                    self.lengths[lane] = end
                    found.append(op)
                case Discard():
                    found.append(op)
                case Share() | Truncate() | Onload():
                    pass  # the lane already holds these tokens, or equal ones
                case Wipe():
                    pass  # no run reads what no lane holds
        return found


def _empties_next(kv_ops: Listing[KvOp], lane: int) -> bool:
    """Whether the next operation on a lane empties it."""
    for op in kv_ops:
        match op:
            case Truncate(truncated, start, None) if truncated == lane:
                return start == 0
            case Share(source, to, _, _) if lane in (source, to):
                return False
            case Offload(_, used, _, _) | Onload(_, used, _, _) if used == lane:
                return False
    return False


class DecodeGroup(NamedTuple):
    """Parts of one token each, of sequences that have the same adapters."""

    parts: Listing[ScheduledTokens]
    adapters: AdapterInputs = NO_ADAPTERS


class DecodeResult(NamedTuple):
    """The parts in the order of the cache's rows, and their logits, of (parts, vocabulary).

    Reordering the logits would copy them."""

    parts: list[ScheduledTokens]
    logits: Array


class KvCache(Protocol):
    """The keys and values of all lanes. `decode` and `prompt` raise InsufficientMemoryError, after which they can be
    retried, and DeviceError."""

    @property
    def held_tokens(self) -> int:
        """The tokens for which rows take memory, including copies and padding."""
        ...

    def apply(self, changes: Listing[LaneChange]) -> None:
        """Carries out changes in order."""
        ...

    def erase(self, lane: int, end: int) -> None:
        """Leaves a lane its first `end` tokens, and overwrites everything after them: a run that reads that multiplies
        it by 0, and 0 x NaN is NaN. The lane may hold more tokens than its recorded length."""
        ...

    def save(self, lane: int, start: int, end: int) -> bytes:
        """Returns the tokens `start` to `end` of a lane: for each tensor (heads, tokens, width), one after another."""
        ...

    def load(self, lane: int, data: bytes | bytearray, start: int, end: int) -> None:
        """Appends the tokens `start` to `end` to a lane that holds `start`. The data may hold more after them. Raises
        InsufficientMemoryError."""
        ...

    def decode(self, groups: Listing[DecodeGroup]) -> list[DecodeResult]:
        """Computes groups, each in its own runs."""
        ...

    def prompt(self, part: ScheduledTokens, *, num_logits: int, adapters: AdapterInputs = NO_ADAPTERS) -> Array:
        """Computes a part of any length. Returns the logits after its last `num_logits` tokens, of (num_logits,
        vocabulary)."""
        ...

    def release_lanes(self) -> bool:
        """Frees the memory of lanes that hold no token. Returns whether the heap may keep some of it."""
        ...

    def drop_bindings(self) -> None:
        """Drops all bindings, which keep alive adapters' matrices and their session."""
        ...


class OwnLanes:
    """The lane share of a replica whose memory is its own: it keeps the tokens that the rows hold within that memory.

    The block pool counts a prefix that several lanes share once, but here each lane has its own copy, and a lane that
    shrinks or moves leaves tokens for a moment. So there is memory for one context beyond the pool's tokens, and lanes
    are given up, idle ones first, when the rows hold more than the pool may count:

        |------------- kv_tokens -------------|---- a context ----|
        |== running and cached prefixes ======:== copies of them =|
                                              ^ idle lanes go     ^ less the longest lane, which may be copied: running
                                                                    lanes go too"""

    def __init__(self, cache: KvCache, lanes: LaneLengths, kv_tokens: int, context_length: int) -> None:
        self._cache = cache
        self._lanes = lanes
        self._kv_tokens = kv_tokens
        self._all_tokens = kv_tokens + context_length

    def __repr__(self) -> str:
        return f"<OwnLanes, {self._cache.held_tokens} of {self._all_tokens} tokens>"

    def request(self, used: int, idle: int, wanted: int) -> int:
        """Returns how many lanes may be held in the next step: one fewer than now while they hold too much, else as
        many more as may each copy the longest."""
        held, longest = self._cache.held_tokens, max(self._lanes.lengths)
        if (idle and held > self._kv_tokens) or (used > 1 and held + longest > self._all_tokens):
            return max(1, used + idle - 1)
        left = self._kv_tokens - held
        more = max(left // longest, left > 0) if longest else wanted
        return min(used + idle + more, len(self._lanes.lengths))

    def give_back(self, lanes: int) -> None:
        if 2 * self._cache.held_tokens > self._kv_tokens:
            self._cache.release_lanes()

    def usage(self) -> KvUsage | None:
        return None


def bytes_per_token(tensors: Listing[KvTensor]) -> int:
    return sum(one.heads * one.width * one.dtype.itemsize for one in tensors)


def pack_tokens(arrays: Listing[Array]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def unpack_tokens(tensors: Listing[KvTensor], data: bytes | bytearray) -> list[Array]:
    """Returns an array for each tensor, with as many tokens as the data holds."""
    count = len(data) // bytes_per_token(tensors)
    arrays, offset = [], 0
    for one in tensors:
        size = one.heads * count * one.width
        arrays.append(np.frombuffer(data, one.dtype, size, offset).reshape(one.heads, count, one.width))
        offset += size * one.dtype.itemsize
    assert offset == len(data), (offset, len(data))
    return arrays


def is_finite(tensors: Listing[KvTensor], data: bytes | bytearray | memoryview) -> bool:
    """Whether all keys and values in saved tokens are finite."""
    view, offset = memoryview(data), 0
    count = len(data) // bytes_per_token(tensors)
    for one in tensors:
        end = offset + one.heads * count * one.width * one.dtype.itemsize
        if not non_finite.all_finite(view[offset:end], _NUMBER_TYPES[one.dtype.name]):
            return False
        offset = end
    return True


def apply_changes(changes: Iterable[LaneChange | HostMove], cache: KvCache, copies: SlotStore | None) -> None:
    """Carries out changes in order. Raises InsufficientMemoryError and DeviceError, after which it is unknown which of
    them are done."""
    for change in changes:
        if isinstance(change, LaneChange):
            cache.apply([change])
            continue
        assert copies is not None, change
        match change:
            case Offload(number, lane, start, end):
                copies.write(number, cache.save(lane, start, end))
            case Onload(number, lane, start, end):
                cache.load(lane, copies.read(number), start, end)
            case Discard(number):
                copies.discard(number)
