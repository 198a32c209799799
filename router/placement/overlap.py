"""How much of a prompt each worker holds, or will soon; pure."""

from collections.abc import Sequence

import numpy as np

from tokenbus.router.placement.predictions import Predictions
from tokenbus.router.placement.prefix_index import MatchLevel, PrefixIndex
from tokenbus.router.placement.worker_table import Floats


def overlaps(index: PrefixIndex, predictions: Predictions, hashes: Sequence[int], num_rows: int, now: float) -> Floats:
    """Leading blocks by row: those that are known to be there, and those that are expected there."""
    predictions.expire(now)
    overlap = np.zeros(num_rows)
    if not hashes:
        return overlap
    levels = index.match(hashes, -1)
    for level in levels:
        _spread(overlap, level)
    for row, depth in predictions.match(hashes, levels).items():
        overlap[row] = depth
    return overlap


def _spread(overlap: Floats, level: MatchLevel) -> None:
    """Notes a level's depth in the rows of its workers."""
    worker_bits = level.worker_bits
    if worker_bits & (worker_bits - 1) == 0:
        overlap[worker_bits.bit_length() - 1] = level.overlap_blocks
        return
    data = np.frombuffer(worker_bits.to_bytes(-(-worker_bits.bit_length() // 8), "little"), np.uint8)
    overlap[np.flatnonzero(np.unpackbits(data, bitorder="little"))] = level.overlap_blocks
