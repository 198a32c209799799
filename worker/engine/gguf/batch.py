"""The arrays that carry a step into llama.cpp, filled through numpy instead of token by token.

`llama_batch_init` is not used: it allocates each token's sequence ids separately, so they would have to be filled one
by one. Here `seq_id[i]` points into one array (8 us instead of 4.9 ms for 2,048 tokens)."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import Literal, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as llama

Outputs = Literal["none", "last", "all"]
"""Which tokens of each part have outputs: a row of logits, or a hidden state."""


class BatchPart(NamedTuple):
    """Consecutive tokens of one sequence."""

    number: int
    """The sequence, counted from the first one of the batch's context."""
    start: int
    """The position of the first token."""
    token_ids: Listing[int]


class LlamaBatch:
    """A `llama_batch` over numpy arrays that it owns, for at most `capacity` tokens."""

    def __init__(self, capacity: int, first_seq_id: int) -> None:
        self._first_seq_id = first_seq_id
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._seq_ids = np.zeros(capacity, np.int32)
        # Every token belongs to exactly one sequence.
        self._num_seq_ids = np.ones(capacity, np.int32)
        self._wants_outputs = np.zeros(capacity, np.int8)
        # llama.cpp expects a pointer to each token's sequence ids: for token i, element i of one array.
        addresses = self._seq_ids.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._seq_ids.itemsize
        self._seq_id_pointers = addresses.astype(np.uintp)
        self.struct = llama.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, llama.llama_token),
            embd=None,
            pos=_pointer(self._positions, llama.llama_pos),
            n_seq_id=_pointer(self._num_seq_ids, ctypes.c_int32),
            seq_id=_pointer(self._seq_id_pointers, ctypes.POINTER(llama.llama_seq_id)),
            logits=_pointer(self._wants_outputs, ctypes.c_int8),
        )

    def __repr__(self) -> str:
        return f"<LlamaBatch of {self.struct.n_tokens}>"

    def fill(self, parts: Iterable[BatchPart], outputs: Outputs) -> None:
        """Lays out the tokens of all parts one after another."""
        at = 0
        for number, start, token_ids in parts:
            end = at + len(token_ids)
            self._tokens[at:end] = token_ids
            self._positions[at:end] = range(start, start + len(token_ids))
            self._seq_ids[at:end] = self._first_seq_id + number
            self._wants_outputs[at:end] = outputs == "all"
            self._wants_outputs[end - 1] = outputs != "none"
            at = end
        self.struct.n_tokens = at


def _pointer(array: np.ndarray, ctype: type) -> ctypes._Pointer:  # type: ignore[type-arg]
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctype))
