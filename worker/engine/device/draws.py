"""Draws: which token comes next when the sampling parameters leave several.

The tokens of a row, sorted by falling probability, are laid out from 0 to 1; a uniform number picks the token that it
falls on:

    0                                    0.8      u      1
    |------ likeliest ------|-- second --|-- third --|- ..    top_k, top_p and min_p cut the row on the right first

Sorting 150,000 logits takes far longer than one pass over them. So a small top_k is found by groups (`top_k_ids`), and
without top_k a token is drawn by summing probabilities in bins of similar logits (`_token_at`).
"""

from collections.abc import Sequence as Listing
from typing import Any

import msgspec
import numpy as np
import xxhash

from tokenbus.worker.contract import engine_request

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Weights = np.ndarray[tuple[int], np.dtype[np.float64]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

MAX_BATCHED_TOP_K = 256
"""Rows with a top_k of at most this are drawn together."""
_GROUP_LOGITS = 64
"""The number of logits compared as one group in the search for the largest."""
_NUM_BINS = 1_024
_MAX_SORTED = 2_048
"""Up to this many tokens are sorted rather than put into bins."""
_FAR = 1e30
"""Logits smaller than the largest by at least this much share a bin: they are practically ruled out."""
_ROUNDING = 1e-9
"""A bound on the relative error of a sum of a million numbers, which depends on the order of addition."""


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) for one token of a request: always the same for the same seed and position."""
    return xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed) / 2.0**64


def draw_from_top_k(logits: Matrix, samplings: Listing[engine_request.Sampling], us: Listing[float]) -> Indices:
    """Draws a token from each row, for rows that have the same `top_k`, from 1 to the width of a row.

    `top_k` decides which of several equally likely tokens are kept, so it must not depend on the other rows."""
    ids = top_k_ids(logits, samplings[0].top_k)
    found = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
    chosen = draw_from_sorted(found, samplings, np.array(us)[:, None])
    return np.take_along_axis(ids, chosen[:, None], axis=1)[:, 0]


def draw_from_all(row: Row, sampling: engine_request.Sampling, u: float) -> int:
    """Draws from a row with many candidates: the same token as `draw_sorted`, usually without sorting."""
    found = _draw_unsorted(row, sampling, u)
    return draw_sorted(row, sampling, u) if found is None else found


def draw_sorted(row: Row, sampling: engine_request.Sampling, u: float) -> int:
    """Defines what a draw is. Of equally likely tokens the one with the larger id comes first."""
    order = np.argsort(row, kind="stable")[::-1]
    if sampling.top_k:
        order = order[: sampling.top_k]
    return int(order[draw_from_sorted(row[order].astype(np.float64)[None], [sampling], np.array([[u]]))[0]])


def draw_from_sorted(
    logits: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
    samplings: Listing[engine_request.Sampling],
    us: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
) -> Indices:
    """Draws an index from each row of logits, sorted in descending order."""
    top_p = np.array([sampling.top_p for sampling in samplings])[:, None]
    min_p = np.array([sampling.min_p for sampling in samplings])[:, None]
    temperature = np.array([sampling.temperature for sampling in samplings])[:, None]
    shifted = logits - logits[:, :1]
    weights = np.exp(shifted)
    before = np.cumsum(weights, axis=1) - weights
    # top_p is compared with the sum before a token, so the token that reaches it is kept.
    allowed = (before < top_p * weights.sum(axis=1, keepdims=True)) & (weights >= min_p)
    allowed[:, 0] = True
    # A token that is ruled out has no weight, and rounding must not let it in.
    allowed &= weights > 0
    sums = np.cumsum(np.where(allowed, np.exp(shifted / temperature), 0.0), axis=1)
    last = allowed.shape[1] - 1 - np.argmax(allowed[:, ::-1], axis=1)
    # Rounding may put u beyond the last sum; then the last allowed token is drawn.
    chosen: Indices = np.minimum((sums <= us * sums[:, -1:]).sum(axis=1), last)
    return chosen


def top_k_ids(logits: Matrix, count: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """Returns the ids of the `count` largest logits of each row, the largest first.

    They all lie within the `count` groups with the largest maxima, so few logits have to be compared."""
    rows, width = logits.shape
    if width <= 2 * _GROUP_LOGITS * count:
        candidates = np.argpartition(logits, width - count, axis=1)[:, width - count :]
    else:
        groups = width // _GROUP_LOGITS
        grouped = logits[:, : groups * _GROUP_LOGITS]
        maxima = grouped.reshape(rows, groups, _GROUP_LOGITS).max(axis=2)
        picked = np.argpartition(maxima, groups - count, axis=1)[:, groups - count :]
        candidates = (picked[:, :, None] * _GROUP_LOGITS + np.arange(_GROUP_LOGITS)).reshape(rows, -1)
        rest = np.arange(groups * _GROUP_LOGITS, width)  # logits after the last whole group
        candidates = np.concatenate([candidates, np.broadcast_to(rest, (rows, len(rest)))], axis=1)
    order = np.argsort(-np.take_along_axis(logits, candidates, axis=1), axis=1, kind="stable")[:, :count]
    return np.take_along_axis(candidates, order, axis=1)


def _draw_unsorted(row: Row, sampling: engine_request.Sampling, u: float) -> int | None:
    """Draws without sorting; None if the last bits of a sum decide, or equally likely tokens at a cut."""
    if 0 < sampling.top_k < len(row):
        least = np.partition(row, -sampling.top_k)[-sampling.top_k]
        # If fewer than top_k tokens are not ruled out, these are all.
        ids = np.flatnonzero(row >= least if np.isfinite(least) else np.isfinite(row))
        if len(ids) > sampling.top_k:
            return None
        found = _draw_unsorted(row[ids], msgspec.structs.replace(sampling, top_k=0), u)
        return None if found is None else int(ids[found])
    if sampling.top_p == 1 and sampling.min_p == 0:
        return _token_at(row, _weights(row, sampling.temperature), u)
    weights = _weights(row, 1.0)
    kept = weights >= sampling.min_p
    if sampling.top_p < 1:
        last = _token_at(row, weights, sampling.top_p)
        if last is None:
            return None
        kept &= row >= row[last]
        kept[:last] &= row[:last] != row[last]  # equally likely ones with smaller ids come after it
    ids = np.flatnonzero(kept)
    found = _token_at(row[ids], _weights(row[ids], sampling.temperature), u)
    return None if found is None else int(ids[found])


def _weights(row: Row, temperature: float) -> Weights:
    """Returns each token's probability, relative to the likeliest one's."""
    weights: Weights = np.subtract(row, row.max(), dtype=np.float64)
    weights /= temperature
    return np.exp(weights, out=weights)


def _token_at(logits: Row, weights: Weights, share: float) -> int | None:
    """Returns the index of the token at which the sum of weights, by descending logits, passes a share of the total.

    Returns None if the last bits decide. Weights are summed in bins of similar logits, and only the bin in which the
    sum passes is searched, in the same way, until its tokens are few enough to sort:

        bins      | 0 | 1 |   2   |  3 | ...      `before` is the sum of bins 0 and 1
        target              ^ share * whole
    """
    whole = weights.sum()
    target, before = share * whole, 0.0
    indices: Any = None
    while len(logits) > _MAX_SORTED and (bins := _to_bins(logits)) is not None:
        sums = before + np.bincount(bins, weights).cumsum()
        at = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
        before = sums[at - 1] if at else before
        inside = np.flatnonzero(bins == at)
        indices = inside if indices is None else indices[inside]
        logits, weights = logits[inside], weights[inside]
    order = np.argsort(logits, kind="stable")[::-1]
    sums = np.concatenate([[before], before + weights[order].cumsum()])
    at = int(np.searchsorted(sums, target, side="right"))
    margin = _ROUNDING * whole
    if at == len(sums) or sums[at] - target < margin or 0 < sums[at - 1] > target - margin:
        return None
    return int(order[at - 1] if indices is None else indices[order[at - 1]])


def _to_bins(logits: Row) -> Any:
    """Returns the bin of each logit, in descending order of logits; None if all are practically equal."""
    most = logits.max()
    least = logits.min(where=logits > most - _FAR, initial=most)
    if least == most:
        return None
    with np.errstate(over="ignore"):
        scaled = most - logits
        scaled *= (_NUM_BINS - 1) / (most - least)
    return np.minimum(scaled, _NUM_BINS - 1, out=scaled).astype(np.intp)
