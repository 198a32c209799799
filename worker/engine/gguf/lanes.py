"""Carries out the block pool's operations on llama.cpp's sequences, and copies them to host memory and back.

llama.cpp saves and restores whole sequences only. To save part of a lane, that part is first shared with the scratch
sequence, which costs nothing, and the scratch sequence is saved. Restoring goes the same way back."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
from collections.abc import Sequence as Listing
from typing import NamedTuple

from llama_cpp import llama_cpp as llama

from tokenbus.worker.engine.gguf import backend
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate
from tokenbus.worker.engine.runner import DeviceError

SCRATCH = 0
"""The id of the scratch sequence. It comes first, because llama.cpp saves only sequences with ids below `n_seq_max`."""


class StateBlob(NamedTuple):
    """The KV of a few tokens as llama.cpp writes it; only the same model, cache types and build can read it."""

    fingerprint: str
    data: ctypes.Array[ctypes.c_uint8]


class ForeignStateError(ValueError):
    """A state blob is of another model, other cache types or another build."""


class Lanes:
    """The lanes of one context. Lane 0 is the sequence `first_seq_id`."""

    def __init__(self, context: llama.llama_context_p, fingerprint: str, first_seq_id: int) -> None:
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._fingerprint = fingerprint
        self._first = first_seq_id
        self.copies: SlotStore | None = None
        """The copies in host memory; None where there can't be any."""

    def __repr__(self) -> str:
        return f"<Lanes, {self.copies!r}>"

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        """Carries out operations in order. Raises DeviceError if llama.cpp can't save or restore a lane."""
        for op in kv_ops:
            match op:
                case Share(lane, to, start, end):
                    self.share(lane, to, start, end)
                case Truncate(lane, start, end):
                    self.truncate(lane, start, end)
                case Offload(number, lane, start, end):
                    self._store.write(number, memoryview(self.save(lane, start, end).data).cast("B"))
                case Onload(number, lane, start, end):
                    self.restore(self._read(number), lane, start, end)
                case Discard(number):
                    self._store.discard(number)

    def share(self, lane: int, to: int, start: int, end: int) -> None:
        """Has lane `to` hold the tokens `start` to `end` of another lane too."""
        llama.llama_memory_seq_cp(self._memory, self._first + lane, self._first + to, start, end)

    def truncate(self, lane: int, start: int, end: int | None = None) -> bool:
        """Removes the tokens `start` to `end` from a lane; all from `start` on if there is no end. Returns whether
        llama.cpp can do that."""
        return bool(llama.llama_memory_seq_rm(self._memory, self._first + lane, start, -1 if end is None else end))

    def save(self, lane: int, start: int, end: int) -> StateBlob:
        """Copies the tokens `start` to `end` of a lane to host memory. Raises DeviceError."""
        llama.llama_memory_seq_cp(self._memory, self._first + lane, SCRATCH, start, end)
        size = llama.llama_state_seq_get_size(self._context, SCRATCH)
        data = (ctypes.c_uint8 * size)()
        written = llama.llama_state_seq_get_data(self._context, data, size, SCRATCH)
        self._clear_scratch()
        if written != size:
            raise DeviceError(f"llama.cpp wrote {written} of {size} bytes of a lane: {backend.last_error()}")
        return StateBlob(self._fingerprint, data)

    def restore(self, blob: StateBlob, lane: int, start: int, end: int) -> None:
        """Adds the tokens `start` to `end` of a copy to a lane. Raises ForeignStateError and DeviceError."""
        if blob.fingerprint != self._fingerprint:
            raise ForeignStateError(f"the state is of {blob.fingerprint}, this engine's are of {self._fingerprint}")
        size = len(blob.data)
        if llama.llama_state_seq_set_data(self._context, blob.data, size, SCRATCH) != size:
            raise DeviceError(f"llama.cpp could not restore a lane's state: {backend.last_error()}")
        llama.llama_memory_seq_cp(self._memory, SCRATCH, self._first + lane, start, end)
        self._clear_scratch()

    def clear(self) -> None:
        """Empties every lane."""
        llama.llama_memory_clear(self._memory, False)

    @property
    def _store(self) -> SlotStore:
        assert self.copies is not None, "there is no host memory to copy to"
        return self.copies

    def _read(self, number: int) -> StateBlob:
        data = self._store.read(number)
        return StateBlob(self._fingerprint, (ctypes.c_uint8 * len(data)).from_buffer(data))

    def _clear_scratch(self) -> None:
        llama.llama_memory_seq_rm(self._memory, SCRATCH, -1, -1)
