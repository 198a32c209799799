"""KV ops: the changes to lanes that the block pool wants, which the runner applies before the next step, in order."""

from typing import NamedTuple


class Share(NamedTuple):
    """Lane `target` gets the tokens `start` to `end` of lane `source`; both hold the same cells from then on."""

    source: int
    target: int
    start: int
    end: int


class Truncate(NamedTuple):
    """A lane drops its tokens from `start` on, or only those up to `end` if given."""

    lane: int
    start: int = 0
    end: int | None = None


class Offload(NamedTuple):
    """The tokens `start` to `end` of a lane are copied to host memory; the copy is known by its id."""

    copy_id: int
    lane: int
    start: int
    end: int


class Onload(NamedTuple):
    """A lane gets the tokens `start` to `end` from a copy, which may hold more."""

    copy_id: int
    lane: int
    start: int
    end: int


class SaveState(NamedTuple):
    """The windows and recurrent states of a lane, as they are at its end, are copied to host memory."""

    copy_id: int
    lane: int


class RestoreState(NamedTuple):
    """A lane gets the windows and recurrent states of a copy; it has all other KV up to the same position."""

    copy_id: int
    lane: int


class Discard(NamedTuple):
    """A copy in host memory is no longer needed."""

    copy_id: int


class Wipe(NamedTuple):
    """All memory that no lane uses is overwritten, since it may hold non-finite numbers."""


KvOp = Share | Truncate | Offload | Onload | SaveState | RestoreState | Discard | Wipe


class OpQueue:
    """The ops of the next step. Consecutive truncations of a lane become one."""

    def __init__(self) -> None:
        self._ops: list[KvOp] = []

    def __repr__(self) -> str:
        return f"<OpQueue of {len(self._ops)}>"

    def add(self, op: KvOp) -> None:
        self._ops.append(op)

    def truncate(self, lane: int, start: int) -> None:
        """Drops all of a lane's tokens from `start` on. Each truncation of a lane starts further to the front than the
        last."""
        self._take_last_truncate(lane)
        self._ops.append(Truncate(lane, start))

    def offload(self, copy_id: int, lane: int, start: int, end: int) -> None:
        """Copies tokens at the end of a lane. An evicted path is copied block by block before one truncation drops it:

        Offload(1, lane, 8, 12), Truncate(lane, 8)
        Offload(1, lane, 8, 12), Offload(2, lane, 4, 8), Truncate(lane, 4)
        """
        pending = self._take_last_truncate(lane)
        self._ops.append(Offload(copy_id, lane, start, end))
        if pending is not None:
            self._ops.append(pending)

    def take(self) -> list[KvOp]:
        """Returns the ops and forgets them."""
        ops, self._ops = self._ops, []
        return ops

    def _take_last_truncate(self, lane: int) -> Truncate | None:
        last = self._ops[-1] if self._ops else None
        if isinstance(last, Truncate) and last.lane == lane and last.end is None:
            self._ops.pop()
            return last
        return None
