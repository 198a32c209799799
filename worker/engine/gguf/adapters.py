"""The LoRA adapters of one context: loaded alongside the model, and set for each decode (decision 0059).

llama.cpp sets adapters for a whole context, not for a sequence, so a step takes one decode for each set of adapters
that its sequences have."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from llama_cpp import llama_cpp as llama

from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract.engine_errors import DeviceError, ModelError
from tokenbus.worker.engine.device.loaded_models import LoadedModels, ReplicaModels
from tokenbus.worker.engine.gguf import adapter_file, backend
from tokenbus.worker.files.gguf_metadata import TensorInfo


class LlamaAdapter:
    """The matrices of one adapter in memory. Raises ModelError if llama.cpp can't load it."""

    def __init__(self, model: llama.llama_model_p, path: Path, data: bytes) -> None:
        self._path = path
        # Loaded from a copy, so that it is what was checked even if the file is replaced meanwhile.
        with os.fdopen(os.memfd_create("adapter"), "wb") as copy:
            copy.write(data)
            copy.flush()
            self.handle = llama.llama_adapter_lora_init(model, f"/proc/self/fd/{copy.fileno()}".encode())
        if not self.handle:
            raise ModelError(f"{path}: llama.cpp can't load it: {backend.last_error()}")

    def __repr__(self) -> str:
        return f"<LlamaAdapter {self._path}>"

    def close(self) -> None:
        """Frees its memory. No context may still have it set."""
        llama.llama_adapter_lora_free(self.handle)


class ContextAdapters:
    """The adapters of one replica by digest, with the number of times that each was loaded.

    `load` may be called from any thread; everything else belongs to the thread that steps. `shared` holds the adapters
    of all replicas of the model."""

    def __init__(
        self,
        model: llama.llama_model_p,
        architecture: str,
        tensors: Mapping[str, TensorInfo],
        shared: LoadedModels[LlamaAdapter],
        context: llama.llama_context_p,
    ) -> None:
        self._model = model
        self._architecture = architecture
        self._tensors = tensors
        self._loaded = ReplicaModels(shared)
        self._context = context
        self._active: tuple[Adapter, ...] = ()
        """Those that are set in the context."""

    def __repr__(self) -> str:
        return f"<ContextAdapters {self._loaded!r}>"

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def load(self, path: Path) -> str:
        """Loads an adapter in addition to the existing ones, and returns its digest. Changes nothing if it raises
        ModelError."""
        digest, data = adapter_file.read(path, self._architecture, self._tensors)
        self._loaded.load(digest, lambda: LlamaAdapter(self._model, path, data))
        return digest

    def unload(self, digest: str) -> None:
        """Reverses one `load`. If that was the last one, no sequence may use the adapter."""
        if self._loaded.is_last(digest) and any(one.digest == digest for one in self._active):
            self.activate(())
        self._loaded.unload(digest)

    def activate(self, adapters: tuple[Adapter, ...]) -> None:
        """Sets the adapters of the next decode. Raises DeviceError."""
        if adapters == self._active:
            return
        handles = [self._loaded[one.digest].handle for one in adapters]
        array = (llama.llama_adapter_lora_p_ctypes * len(adapters))(*handles)
        scales = (ctypes.c_float * len(adapters))(*(one.scale for one in adapters))
        if llama.llama_set_adapters_lora(self._context, array, len(adapters), scales) != 0:
            raise DeviceError(f"llama.cpp can't set adapters: {backend.last_error()}")
        self._active = adapters

    def close(self) -> None:
        """Frees every adapter that no other replica has. The context must no longer be used."""
        self.activate(())
        self._loaded.close()
