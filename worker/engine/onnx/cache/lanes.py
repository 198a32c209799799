"""How many tokens each lane holds, and what has to be copied for the block pool's moves; pure.

The pool's moves are made for lanes that can share memory. Here every lane has its own: to share is to copy, unless the
lane that is shared from gives its tokens up right behind, when its memory changes hands. What a lane holds already is
never copied onto it."""

from collections.abc import Sequence as Listing
from typing import NamedTuple

from tokenbus.worker.engine.kv.ops import KvOp, Share, Truncate


class Copy(NamedTuple):
    """Lane `to`, which holds `start` tokens, gets those up to `end` from lane `lane`."""

    lane: int
    to: int
    start: int
    end: int


class Transfer(NamedTuple):
    """Lane `to`, which is empty, gets the memory of lane `lane` and its first `end` tokens; that one is empty then."""

    lane: int
    to: int
    end: int


class Shrink(NamedTuple):
    """A lane holds only `end` tokens from now on."""

    lane: int
    end: int


class LaneLengths:
    """The lengths of all lanes, in tokens."""

    def __init__(self, num_lanes: int) -> None:
        self.lengths = [0] * num_lanes

    def __repr__(self) -> str:
        return f"<Lanes {sum(map(bool, self.lengths))} of {len(self.lengths)} hold {sum(self.lengths)} tokens>"

    def grow(self, lane: int, start: int, end: int) -> None:
        """Notes that tokens were computed."""
        assert start <= self.lengths[lane], (self.lengths[lane], start)
        self.lengths[lane] = end

    def resolve(self, kv_ops: Listing[KvOp]) -> list[Copy | Transfer | Shrink]:
        """What the moves come to, in order; lengths are then as they will be when all is done."""
        found: list[Copy | Transfer | Shrink] = []
        for place, op in enumerate(kv_ops):
            match op:
                case Share(lane, to, start, end) if end > self.lengths[to]:
                    assert start == self.lengths[to], (op, self.lengths)
                    assert end <= self.lengths[lane], (op, self.lengths)
                    self.lengths[to] = end
                    if start == 0 and _empties_next(kv_ops[place + 1 :], lane):
                        self.lengths[lane] = 0
                        found.append(Transfer(lane, to, end))
                    else:
                        found.append(Copy(lane, to, start, end))
                case Truncate(lane, start, None) if start < self.lengths[lane]:
                    self.lengths[lane] = start
                    found.append(Shrink(lane, start))
                case Share() | Truncate():
                    pass  # it has the tokens, or what replaces them is what it has
                case _:
                    raise AssertionError(f"there is no other memory to move to: {op}")
        return found


def _empties_next(kv_ops: Listing[KvOp], lane: int) -> bool:
    """Whether the next that is asked of a lane is to be empty."""
    for op in kv_ops:
        match op:
            case Truncate(cut, start, None) if cut == lane:
                return start == 0
            case Share(source, to, _, _) if lane in (source, to):
                return False
    return False
