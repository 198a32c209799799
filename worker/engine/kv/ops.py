"""What the block pool has the runner do with lanes, before the next step and in the order given."""

from typing import NamedTuple


class Share(NamedTuple):
    """Lane `to` gets the tokens `start` to `end` of lane `lane`: both hold the same cells from then on."""

    lane: int
    to: int
    start: int
    end: int


class Truncate(NamedTuple):
    """A lane gives up its tokens from `start` to `end`; without an end all that follow."""

    lane: int
    start: int = 0
    end: int | None = None


class Offload(NamedTuple):
    """The tokens `start` to `end` of a lane are copied to host memory under a number."""

    number: int
    lane: int
    start: int
    end: int


class Onload(NamedTuple):
    """Lane `lane` gets the tokens `start` to `end` from the copy with that number; it may have more than these."""

    number: int
    lane: int
    start: int
    end: int


class Discard(NamedTuple):
    """A copy in host memory is not needed any more."""

    number: int


KvOp = Share | Truncate | Offload | Onload | Discard
