"""Finds out what a loaded graph can do, by having it do it: nothing is promised that was not seen."""

from array import array

import numpy as np

from worker import contract
from worker.engine.moves import Share
from worker.engine.onnx.caches import Cache
from worker.engine.onnx.lanes import Lanes
from worker.engine.onnx.session import Array
from worker.engine.plan import Part
from worker.engine.runner import DeviceError, ModelError, NoRoomError
from worker.engine.sequence import Sequence

_TOKENS = 8
_SHARED = 5
"""Of them, those that the third lane has from the first."""
LANES = 3
_CLOSE = 0.05
"""Logits of the same token, computed twice in batches of other shapes, differ by less, against their own spread."""


def agrees(cache: Cache, lanes: Lanes, vocab_size: int, where: str) -> bool:
    """Whether tokens behind a shared prefix, in a batch of unequal rows, come to what they are when computed alone.

    `cache` and its lanes have to be empty. Raises ModelError when nothing can be computed."""
    whole, short, shared = (_sequence(lane, vocab_size) for lane in range(LANES))
    try:
        truth = _prompt(cache, lanes, whole, _TOKENS)
        _prompt(cache, lanes, short, 2)
        cache.apply(lanes.resolve([Share(whole.lane or 0, shared.lane or 0, 0, _SHARED)]))
        for step in range(_TOKENS - _SHARED):
            parts = [Part(short, 2 + step, 1), Part(shared, _SHARED + step, 1)]
            found = cache.decode(parts)
            for part in parts:
                lanes.grow(part.lane, part.start, part.start + 1)
    except (DeviceError, NoRoomError) as error:
        raise ModelError(f"{where}: can't compute a first step: {error}") from error
    if truth.shape != (1, vocab_size) or not np.isfinite(truth).all():
        raise ModelError(f"{where}: its first step gives no logits for a vocabulary of {vocab_size}, or no numbers")
    return bool(np.abs(found[1] - truth[0]).max() <= float(truth.std()) * _CLOSE)


def _prompt(cache: Cache, lanes: Lanes, sequence: Sequence, count: int) -> Array:
    part = Part(sequence, 0, count)
    logits = cache.prompt(part, wants_logits=True)
    lanes.grow(part.lane, 0, count)
    return logits


def _sequence(lane: int, vocab_size: int) -> Sequence:
    tokens = array("I", [(7 * place + 3) % vocab_size for place in range(_TOKENS)])
    sequence = Sequence(lane, tokens, contract.Sampling(max_tokens=1), frozenset())
    sequence.lane = lane
    return sequence
