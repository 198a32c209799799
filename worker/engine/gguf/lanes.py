"""Carries out the block pool's moves on llama.cpp's sequences, and holds the copies that went to host memory."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
from collections.abc import Sequence as Listing
from typing import NamedTuple

from llama_cpp import llama_cpp as llama

from tokenbus.worker.engine.gguf import backend
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate
from tokenbus.worker.engine.runner import DeviceError


class StateBlob(NamedTuple):
    """KV of a few tokens as llama.cpp writes it, which means something only to that model, cache types and build."""

    fingerprint: str
    data: ctypes.Array[ctypes.c_uint8]


class ForeignStateError(ValueError):
    """A state blob of another model, other cache types or another build."""


SCRATCH = 0
"""The sequence through which parts of others are copied: only ids below `n_seq_max` can be saved at all."""


class Lanes:
    """The sequences of one context; lane 0 is sequence `first`, and `SCRATCH` nobody's where `first` is above it."""

    def __init__(self, context: llama.llama_context_p, fingerprint: str, first: int) -> None:
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._fingerprint = fingerprint
        self._first = first
        self._copies: dict[int, StateBlob] = {}

    def __repr__(self) -> str:
        return f"<Lanes, {len(self._copies)} copies>"

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        """Raises DeviceError when llama.cpp can't take a copy back."""
        for op in kv_ops:
            match op:
                case Share(lane, to, start, end):
                    self.share(lane, to, start, end)
                case Truncate(lane, start, end):
                    self.truncate(lane, start, end)
                case Offload(number, lane, start, end):
                    self._copies[number] = self.save(lane, start, end)
                case Onload(number, lane, start, end):
                    self.restore(self._copies[number], lane, start, end)
                case Discard(number):
                    del self._copies[number]

    def share(self, lane: int, to: int, start: int, end: int) -> None:
        llama.llama_memory_seq_cp(self._memory, self._first + lane, self._first + to, start, end)

    def truncate(self, lane: int, start: int, end: int | None = None) -> None:
        llama.llama_memory_seq_rm(self._memory, self._first + lane, start, -1 if end is None else end)

    def save(self, lane: int, start: int, end: int) -> StateBlob:
        """A copy of the tokens `start` to `end` of a lane."""
        llama.llama_memory_seq_cp(self._memory, self._first + lane, SCRATCH, start, end)
        size = llama.llama_state_seq_get_size(self._context, SCRATCH)
        data = (ctypes.c_uint8 * size)()
        written = llama.llama_state_seq_get_data(self._context, data, size, SCRATCH)
        self._clear_scratch()
        if written != size:
            raise DeviceError(f"llama.cpp wrote {written} of {size} bytes of a lane: {backend.last_error()}")
        return StateBlob(self._fingerprint, data)

    def restore(self, blob: StateBlob, lane: int, start: int, end: int) -> None:
        """Gives a lane the tokens `start` to `end` of a copy. Raises ForeignStateError and DeviceError."""
        if blob.fingerprint != self._fingerprint:
            raise ForeignStateError(f"the state is of {blob.fingerprint}, this engine's are of {self._fingerprint}")
        size = len(blob.data)
        if llama.llama_state_seq_set_data(self._context, blob.data, size, SCRATCH) != size:
            raise DeviceError(f"llama.cpp could not take a lane's state back: {backend.last_error()}")
        llama.llama_memory_seq_cp(self._memory, SCRATCH, self._first + lane, start, end)
        self._clear_scratch()

    def clear(self) -> None:
        """Empties every lane."""
        llama.llama_memory_clear(self._memory, False)

    def _clear_scratch(self) -> None:
        llama.llama_memory_seq_rm(self._memory, SCRATCH, -1, -1)
