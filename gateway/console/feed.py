"""Tells the console's pages what a fleet is like, at first all of it and then what has changed. Pure.

All pages get the same events, each encoded once. Names in them come from workers, and pages show them as text."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from tokenbus.client.wire.fleet_picture import FleetPicture, WorkerView
from tokenbus.protocol.wire import messages

ItemT = TypeVar("ItemT", bound=msgspec.Struct)
_Identity = tuple[str, str, int]
"""Model, name and start of a worker."""


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A message to the pages. Workers are numbered by the gateway, whichever router has told of them."""

    seq: int
    whole: bool
    """Whether it has all workers, and those that it does not name are gone."""
    at_ms: int
    """Unix time in ms, by the gateway's clock."""
    problem: str
    """Why the fleet can't be seen; empty if it can."""
    fields: tuple[str, ...]
    """The names of the items of `workers`."""
    routers: Sequence[messages.RouterStats]
    queues: Sequence[messages.ModelQueue]
    joined: Sequence[messages.WorkerSheet]
    workers: Sequence[messages.WorkerNumbers]
    memory: Sequence[messages.WorkerMemory]
    left: Sequence[int]


class FleetFeed:
    """Makes the events of one gateway."""

    def __init__(self) -> None:
        self._seq = 0
        self._numbers: dict[_Identity, int] = {}
        self._next_number = 0
        self._known: dict[int, WorkerView] = {}
        self._last = _event(0, 0, "", FleetPicture())

    def __repr__(self) -> str:
        return f"<FleetFeed {self._seq}, {len(self._known)} workers>"

    @property
    def has_begun(self) -> bool:
        """Whether there has been an event."""
        return self._seq > 0

    def update(self, picture: FleetPicture, problem: str, at_ms: int) -> bytes:
        """Compares the picture with the last event; returns the next one, which says what has changed.

        While the picture is not complete, the workers stay as they were: a page need not flicker when a router dies."""
        views = {self._number_of(view): view for view in picture.workers()} if picture.is_complete else self._known
        self._seq += 1
        changed = [
            (number, before, view)
            for number, view in views.items()
            if (before := self._known.get(number)) is None or before != view
        ]
        event = msgspec.structs.replace(
            _event(self._seq, at_ms, problem, picture),
            joined=[_renumbered(view.sheet, number) for number, old, view in changed if _is_new(old, view, 0)],
            workers=[_renumbered(view.numbers, number) for number, old, view in changed if _is_new(old, view, 1)],
            memory=[
                _renumbered(view.memory, number)
                for number, old, view in changed
                if view.memory is not None and _is_new(old, view, 2)
            ],
            left=sorted(self._known.keys() - views.keys()),
        )
        self._known, self._last = views, event
        self._numbers = {identity: number for identity, number in self._numbers.items() if number in views}
        return _encoded(event)

    def whole(self) -> bytes:
        """Returns an event that says everything, as of the last update."""
        return _encoded(
            msgspec.structs.replace(
                self._last,
                whole=True,
                fields=messages.WorkerNumbers.__struct_fields__,
                joined=[_renumbered(view.sheet, number) for number, view in self._known.items()],
                workers=[_renumbered(view.numbers, number) for number, view in self._known.items()],
                memory=[
                    _renumbered(view.memory, number) for number, view in self._known.items() if view.memory is not None
                ],
                left=[],
            )
        )

    def _number_of(self, view: WorkerView) -> int:
        identity = (view.sheet.model, view.sheet.worker_id, view.sheet.since_ms)
        if identity not in self._numbers:
            self._numbers[identity] = self._next_number
            self._next_number += 1
        return self._numbers[identity]


def _event(seq: int, at_ms: int, problem: str, picture: FleetPicture) -> FleetEvent:
    return FleetEvent(
        seq=seq,
        whole=False,
        at_ms=at_ms,
        problem=problem,
        fields=(),
        routers=picture.routers(),
        queues=list(picture.queues().values()),
        joined=(),
        workers=(),
        memory=(),
        left=(),
    )


def _is_new(before: WorkerView | None, after: WorkerView, part: int) -> bool:
    return before is None or before[part] != after[part]


def _renumbered(item: ItemT, number: int) -> ItemT:
    return msgspec.structs.replace(item, number=number)


def _encoded(event: FleetEvent) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
