"""Divides the memory of a device among the processes that have claimed some of it."""

from collections.abc import Iterable
from typing import NamedTuple

from tokenbus.worker.files.device_memory import DeviceMemory

_RESERVE_SHARE = 16
_LEAST_RESERVE = 512 << 20
_MOST_RESERVE = 4 << 30
_MAX_RESERVE_SHARE = 4


class OtherClaim(NamedTuple):
    """The memory that another process has planned to take of a device."""

    claimed_bytes: int
    taken_bytes: int
    """The part that it has already taken, so that it is no longer free."""
    later_bytes: int = 0
    """The additional memory that it may take gradually, for copies of prefixes."""


class Room(NamedTuple):
    """The memory of a device that a replica may take, including what its process has already taken for it."""

    total_bytes: int
    """The device's total memory."""
    free_bytes: int
    """The part that no other process has taken, or is about to take; others may need some of it later."""
    chosen_bytes: int
    """The part for which sizes are chosen: a share of the memory, without a reserve."""


UNLIMITED = Room(1 << 62, 1 << 62, 1 << 62)
"""The room if nothing is known about it."""


def reserve_bytes(total_bytes: int) -> int:
    """Returns the memory of a device that is left for others, and for what no estimate covers."""
    usual = max(_LEAST_RESERVE, min(_MOST_RESERVE, total_bytes // _RESERVE_SHARE))
    return min(usual, total_bytes // _MAX_RESERVE_SHARE)


def room_of(
    device: DeviceMemory, taken_bytes: int, elsewhere_bytes: int, others: Iterable[OtherClaim], share: float
) -> Room:
    """Returns the room for a part of a process, which has taken `taken_bytes` of the device and claimed
    `elsewhere_bytes` for its other parts. All workers together may have what is free and what they already have; the
    process gets a share of that."""
    listed = list(others)
    own = device.free_bytes + taken_bytes - sum(one.claimed_bytes - one.taken_bytes for one in listed)
    of_all = device.free_bytes + taken_bytes + sum(one.taken_bytes for one in listed)
    later = sum(one.later_bytes for one in listed)
    chosen = min(own - later, int(of_all * share)) - reserve_bytes(device.total_bytes)
    return Room(device.total_bytes, max(0, own - elsewhere_bytes), max(0, chosen - elsewhere_bytes))
