"""Which sequences decode in one batch, where every row is as long as the longest; pure."""

from collections.abc import Mapping


def bucket_by_length(lengths: Mapping[int, int], max_paddings: int) -> list[list[int]]:
    """Lanes in batches, longest first: a batch has at most `max_paddings` columns in which rows have no token."""
    batches: list[list[int]] = []
    longest = paddings = 0
    for lane in sorted(lengths, key=lambda lane: (-lengths[lane], lane)):
        paddings += longest - lengths[lane]
        if not batches or paddings > max_paddings:
            batches.append([])
            longest, paddings = lengths[lane], 0
        batches[-1].append(lane)
    return batches
