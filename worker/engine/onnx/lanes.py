"""Keeps the length of each lane, and turns the block pool's operations into copies.

The pool assumes that lanes can share memory. Here each lane has its own, so sharing means copying, unless the sharing
lane is emptied right after: then its memory changes hands. Tokens that a lane already holds are never copied."""

from collections.abc import Sequence as Listing
from typing import NamedTuple

from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate, Wipe


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
    """The lengths of all lanes in tokens."""

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
