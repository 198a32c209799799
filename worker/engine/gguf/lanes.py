"""Carries out the block pool's operations on llama.cpp's sequences, and copies them to host memory and back.

llama.cpp saves and restores whole sequences only. To save part of a lane, that part is first shared with the scratch
sequence, which costs nothing, and the scratch sequence is saved. Restoring goes the same way back.

If a lane has a partial state (windows, recurrent layers), llama.cpp writes it after the KV of the other layers. It is
cut off there and copied separately: sharing any part of a lane also shares its current partial state, so the receiver's
is always restored last.

    whole      | header | KV of the scratch sequence | its partial state |
    KV copy    | header | KV                         |
    restored   | header | KV                         | that of an empty sequence |
"""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
from collections.abc import Sequence as Listing

import numpy as np
from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.engine.gguf import backend
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, RestoreState, SaveState, Share, Truncate, Wipe

SCRATCH = 0
"""The id of the scratch sequence. It comes first, because llama.cpp saves only sequences with ids below `n_seq_max`."""
FIRST_SEQ_ID = 1
"""The id of lane 0."""
_HEADER_BYTES = 8
"""The prefix of every sequence that llama.cpp saves: a magic number and the sequence's id."""
_MAGIC_BYTES = 4
_WHOLE, _PARTIAL_STATE = 0, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


Data = ctypes.Array[ctypes.c_uint8]
"""Tokens or a state as llama.cpp writes them; only the same model, cache types and build can read them."""


class Lanes:
    """The lanes of one context."""

    def __init__(self, context: llama.llama_context_p, *, has_partial_state: bool = False) -> None:
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self.copies: SlotStore | None = None
        """The copies in host memory; None if there can't be any."""
        self._magic: bytes | None = None
        """The prefix of every partial state."""
        self._empty_state: bytes | None = None
        """The partial state of an empty sequence, if lanes have any."""
        if has_partial_state:
            empty = bytes(self._get(SCRATCH, _PARTIAL_STATE))
            self._magic, self._empty_state = empty[:_MAGIC_BYTES], empty[_HEADER_BYTES:]

    def __repr__(self) -> str:
        return f"<Lanes, {self.copies!r}>"

    @property
    def has_partial_state(self) -> bool:
        return self._empty_state is not None

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        """Carries out operations in order. Raises DeviceError if llama.cpp can't save or restore a lane."""
        for op in kv_ops:
            match op:
                case Share(lane, to, start, end):
                    self.share(lane, to, start, end)
                case Truncate(lane, start, end):
                    self.truncate(lane, start, end)
                case Offload(number, lane, start, end):
                    self._store.write(number, memoryview(self.save(lane, start, end)).cast("B"))
                case SaveState(number, lane):
                    self._store.write(number, memoryview(self.save_state(lane)).cast("B"))
                case RestoreState(number, lane):
                    self.restore_state(self._read(number), lane)
                case Onload(number, lane, start, end):
                    self.restore(self._read(number), lane, start, end)
                case Discard(number):
                    self._store.discard(number)
                case Wipe():
                    self.wipe()

    def share(self, lane: int, to: int, start: int, end: int) -> None:
        """Makes lane `to` hold the tokens `start` to `end` of another lane too."""
        llama.llama_memory_seq_cp(self._memory, FIRST_SEQ_ID + lane, FIRST_SEQ_ID + to, start, end)

    def truncate(self, lane: int, start: int, end: int | None = None) -> bool:
        """Removes the tokens `start` to `end` from a lane; all from `start` on if there is no end. Returns whether
        llama.cpp can do that: a window may have lost what it needs, even if the library reports success."""
        if self._empty_state is not None and (start or end is not None):
            return False
        return bool(llama.llama_memory_seq_rm(self._memory, FIRST_SEQ_ID + lane, start, -1 if end is None else end))

    def save(self, lane: int, start: int, end: int) -> Data:
        """Copies the tokens `start` to `end` of a lane to host memory. Raises DeviceError."""
        llama.llama_memory_seq_cp(self._memory, FIRST_SEQ_ID + lane, SCRATCH, start, end)
        data = self._get(SCRATCH, _WHOLE)
        if self._empty_state is not None:
            count = len(data) - (self._size(SCRATCH, _PARTIAL_STATE) - _HEADER_BYTES)
            data = (ctypes.c_uint8 * count).from_buffer_copy(data)
        self.clear_scratch()
        return data

    def restore(self, data: Data, lane: int, start: int, end: int) -> None:
        """Adds the tokens `start` to `end` of a copy to a lane. Raises DeviceError."""
        if self._empty_state is not None:
            whole = bytes(data) + self._empty_state
            data = (ctypes.c_uint8 * len(whole)).from_buffer_copy(whole)
        self._set(SCRATCH, data, _WHOLE)
        llama.llama_memory_seq_cp(self._memory, SCRATCH, FIRST_SEQ_ID + lane, start, end)
        self.clear_scratch()

    def save_state(self, lane: int) -> Data:
        """Copies the partial state of a lane to host memory. Raises DeviceError."""
        return self._get(FIRST_SEQ_ID + lane, _PARTIAL_STATE)

    def restore_state(self, data: Data, lane: int) -> None:
        """Gives a lane a partial state; it has the KV up to the same position. Raises DeviceError."""
        self._set(FIRST_SEQ_ID + lane, data, _PARTIAL_STATE)

    def state_problem(self, data: memoryview) -> str:
        """Says in a word why data can't be a partial state; empty if it may be. Wrong numbers can't be detected."""
        assert self._magic is not None
        return "" if data[: len(self._magic)] == self._magic and len(data) > _HEADER_BYTES else "framing"

    def clear(self) -> None:
        """Empties every lane."""
        llama.llama_memory_clear(self._memory, False)

    def take_back(self, lane: int, start: int) -> bool:
        """Removes the tokens of a lane from `start` on, or all if it can't be truncated there; returns whether it
        could."""
        return self.truncate(lane, start) or not self.truncate(lane, 0)

    def clear_scratch(self) -> None:
        """Empties the scratch sequence."""
        llama.llama_memory_seq_rm(self._memory, SCRATCH, -1, -1)

    def wipe(self) -> None:
        """Overwrites all memory that no lane uses: attention may multiply what is there by 0, and 0 x NaN is NaN.

        llama.cpp has no call for that, but it zeroes its memory before it restores a whole context's sequences. So they
        are copied and restored, at memory speed. Raises DeviceError."""
        try:
            data = np.empty(llama.llama_state_get_size(self._context), np.uint8)
        except MemoryError as error:
            raise DeviceError("there is no memory to copy the lanes to") from error
        pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        for move in (llama.llama_state_get_data, llama.llama_state_set_data):
            if move(self._context, pointer, len(data)) != len(data):
                raise DeviceError(f"llama.cpp could not rewrite its memory: {backend.last_error()}")

    @property
    def _store(self) -> SlotStore:
        assert self.copies is not None, "there is no host memory to copy to"
        return self.copies

    def _read(self, number: int) -> Data:
        data = self._store.read(number)
        return (ctypes.c_uint8 * len(data)).from_buffer(data)

    def _size(self, seq_id: int, flags: int) -> int:
        return int(llama.llama_state_seq_get_size_ext(self._context, seq_id, flags))

    def _get(self, seq_id: int, flags: int) -> Data:
        size = self._size(seq_id, flags)
        data = (ctypes.c_uint8 * size)()
        written = llama.llama_state_seq_get_data_ext(self._context, data, size, seq_id, flags)
        if written != size:
            raise DeviceError(f"llama.cpp wrote {written} of {size} bytes of a lane: {backend.last_error()}")
        return data

    def _set(self, seq_id: int, data: Data, flags: int) -> None:
        size = len(data)
        if llama.llama_state_seq_set_data_ext(self._context, data, size, seq_id, flags) != size:
            raise DeviceError(f"llama.cpp could not restore a lane's state: {backend.last_error()}")
