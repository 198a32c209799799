"""Reduces rows of logits to packed log probabilities."""

from collections.abc import Sequence as Listing
from typing import Any

import numpy as np

from tokenbus.worker.engine.device import draws
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.prompt_scores import Pack

_BLOCK_LOGITS = 1 << 17
"""The logits that are reduced together, few enough for the processor's cache."""


def packer(rows: Matrix) -> Pack:
    """Returns what packs the log probabilities that rows give."""
    return lambda first, token_ids, count: pack_scores(rows[first : first + len(token_ids)], token_ids, count)


def pack_scores(rows: Matrix, token_ids: Listing[int], num_alternatives: int) -> bytes:
    """Returns a record for each row, as in `worker/contract/prompt_logprobs.py`: that of the row's token, and those of
    the likeliest ones. The rows are left as they are."""
    alternative = np.dtype([("id", "<u4"), ("logprob", "<f4")])
    record = [("id", "<u4"), ("logprob", "<f4"), ("rank", "<u4"), ("top", alternative, (num_alternatives,))]
    packed = np.empty(len(rows), np.dtype(record))
    packed["id"] = token_ids
    size = max(1, _BLOCK_LOGITS // rows.shape[1])
    # The same memory for all blocks: new memory would take longer than what is done with it.
    weights, above = np.empty((size, rows.shape[1]), np.float32), np.empty((size, rows.shape[1]), np.bool_)
    for start in range(0, len(rows), size):
        block = rows[start : start + size]
        _reduce(block, packed[start : start + size], weights[: len(block)], above[: len(block)])
    return packed.tobytes()


def _reduce(rows: Matrix, packed: Any, weights: Matrix, above: Any) -> None:
    own = np.take_along_axis(rows, packed["id"].astype(np.int64)[:, None], axis=1)
    most = rows.max(axis=1, keepdims=True)
    np.subtract(rows, most, out=weights)
    np.exp(weights, out=weights)
    log_sums = most + np.log(weights.sum(axis=1, keepdims=True), dtype=np.float64)
    packed["logprob"] = (own - log_sums)[:, 0]
    np.greater(rows, own, out=above)
    packed["rank"] = 1 + np.count_nonzero(above, axis=1)
    top = packed["top"]
    if top.shape[1]:
        found = draws.top_k_ids(rows, top.shape[1])
        top["id"] = found
        top["logprob"] = np.take_along_axis(rows, found, axis=1) - log_sums
