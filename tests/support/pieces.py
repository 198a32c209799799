"""Embedders whose rows are the lengths of inputs, computed whole or piece by piece."""

from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.protocol.wire import messages
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.runner import BatchLimits, PoolingPass, WholePass


class Lengths:
    """An embedder whose rows are the lengths of the inputs; notes its batches."""

    width = 2
    max_input_tokens = 8
    vocab_size = 100

    def __init__(self, limits: BatchLimits) -> None:
        self.batch_limits = limits
        self.batches: list[list[int]] = []
        self.failure: Exception | None = None

    def tokenize(self, text: str) -> list[int]:
        return [1] * len(text)

    def describe(self) -> messages.CardEmbeddings:
        return messages.CardEmbeddings(dimensions=2, pooling="last", max_input_tokens=8)

    def begin(self, inputs: Listing[Listing[int]]) -> PoolingPass:
        return WholePass(self.pool, inputs)

    def pool(self, inputs: Listing[Listing[int]]) -> Matrix:
        self.batches.append([len(one) for one in inputs])
        if self.failure is not None:
            raise self.failure
        return np.array([[len(one), 3.0] for one in inputs], np.float32)


class Pieces(Lengths):
    """Cuts inputs anywhere; notes the tokens of each piece."""

    def __init__(self, limits: BatchLimits) -> None:
        super().__init__(limits)
        self.pieces: list[int] = []
        self.noted: Callable[[str], None] = lambda what: None
        """Called with "e" for each piece."""

    def begin(self, inputs: Listing[Listing[int]]) -> PoolingPass:
        return PiecePass(self, inputs)


class PiecePass:
    def __init__(self, pieces: Pieces, inputs: Listing[Listing[int]]) -> None:
        self._pieces = pieces
        self._inputs = inputs
        self._left = sum(map(len, inputs))

    def advance(self, max_tokens: int) -> Matrix | None:
        self._pieces.noted("e")
        self._pieces.pieces.append(min(max_tokens, self._left))
        self._left -= self._pieces.pieces[-1]
        return None if self._left else self._pieces.pool(self._inputs)
