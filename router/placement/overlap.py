"""How much of a prompt each worker holds, or will soon; pure."""

from collections.abc import Sequence

import numpy as np

from tokenbus.router.placement.columns import Floats
from tokenbus.router.placement.index import Level, PrefixIndex
from tokenbus.router.placement.predictions import Predictions


def overlaps(index: PrefixIndex, predictions: Predictions, hashes: Sequence[int], num_rows: int, now: float) -> Floats:
    """Leading blocks by row: those that are known to be there, and those that are expected there."""
    predictions.tick(now)
    overlap = np.zeros(num_rows)
    if not hashes:
        return overlap
    levels = index.match(hashes, -1)
    for level in levels:
        _spread(overlap, level)
    for row, depth in predictions.reach(hashes, levels).items():
        overlap[row] = depth
    return overlap


def _spread(overlap: Floats, level: Level) -> None:
    """Notes a level's depth in the rows of its workers."""
    places = level.places
    if places & (places - 1) == 0:
        overlap[places.bit_length() - 1] = level.overlap_blocks
        return
    data = np.frombuffer(places.to_bytes(-(-places.bit_length() // 8), "little"), np.uint8)
    overlap[np.flatnonzero(np.unpackbits(data, bitorder="little"))] = level.overlap_blocks
