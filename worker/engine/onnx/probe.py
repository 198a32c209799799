"""Finds out by trial whether a graph computes the same in a batch as alone: an engine offers only what it has seen
work."""

from array import array

import numpy as np

from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError, ModelError
from tokenbus.worker.engine.onnx.graph import Array
from tokenbus.worker.engine.onnx.kv_cache import Copy, DecodeGroup, KvCache, LaneLengths
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens
from tokenbus.worker.engine.scheduling.sequence import Sequence

LANES = 4
TOKENS = 16
"""The length of the longest lane."""
PADDINGS = LANES * TOKENS
"""More than any batch of the trial has."""
_WHOLE = 8
_SHARED = 5
"""The number of tokens, out of all, that another lane shares."""
_STEPS = _WHOLE - _SHARED
_CLOSE = 0.05
"""The largest standard deviation of the differences between logits, as a share of the logits' own, that counts as
equal. Batches of other shapes round differently: with 4-bit weights it was up to 0.02, since activations are rounded to
8 bits, and 0.14 where a graph ignored its mask. The largest difference would be a worse measure: it grows with the
vocabulary."""


def batches_agree(cache: KvCache, lanes: LaneLengths, vocab_size: int, where: str) -> bool:
    """Computes tokens after a shared prefix, in a batch with a longer row and an equal one, and compares the last
    logits with those of the same tokens computed alone.

    The longer row forces padding on the shorter ones. The equal one shares their batch if padding is not allowed.
    `cache` and `lanes` must be empty. Raises ModelError if nothing can be computed."""
    whole, shared = _sequence(0, vocab_size, text=0), _sequence(1, vocab_size, text=0)
    longer, equal = _sequence(2, vocab_size, text=1), _sequence(3, vocab_size, text=2)
    try:
        truth = _prompt(cache, lanes, whole, _WHOLE)
        _prompt(cache, lanes, longer, TOKENS - _STEPS)
        _prompt(cache, lanes, equal, _SHARED)
        cache.apply([Copy(whole.seq_no, shared.seq_no, 0, _SHARED)])
        lanes.grow(shared.seq_no, 0, _SHARED)
        for _ in range(_STEPS):
            batch = (shared, longer, equal)
            parts = [ScheduledTokens(sequence, lanes.lengths[sequence.seq_no], 1) for sequence in batch]
            ((in_rows, logits),) = cache.decode([DecodeGroup(parts)])
            found = logits[[part.sequence is shared for part in in_rows]]
            for part in parts:
                lanes.grow(part.lane, part.start, part.start + 1)
    except (DeviceError, InsufficientMemoryError) as error:
        raise ModelError(f"{where}: can't compute a first step: {error}") from error
    if truth.shape != (1, vocab_size) or not np.isfinite(truth).all():
        raise ModelError(f"{where}: its first step gives no logits for a vocabulary of {vocab_size}, or no finite ones")
    return bool((found[0] - truth[0]).std() <= truth.std() * _CLOSE)


def canary(vocab_size: int) -> list[int]:
    """Returns the first token of the trial, after which numbers were finite."""
    return list(_sequence(0, vocab_size, text=0).token_ids[:1])


def _prompt(cache: KvCache, lanes: LaneLengths, sequence: Sequence, count: int) -> Array:
    part = ScheduledTokens(sequence, 0, count)
    logits = cache.prompt(part, num_logits=1)
    lanes.grow(part.lane, 0, count)
    return logits


def _sequence(lane: int, vocab_size: int, *, text: int) -> Sequence:
    """Returns a sequence whose number is that of its lane."""
    tokens = array("I", [(7 * place + 3 + 11 * text) % vocab_size for place in range(TOKENS)])
    sequence = Sequence(lane, tokens, engine_request.Sampling(max_tokens=1), frozenset())
    sequence.lane = lane
    return sequence
