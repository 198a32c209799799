"""A model in memory: weights, vocabulary and what its files say; any number of contexts share it."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import llama_cpp
from llama_cpp import llama_cpp as llama

from worker.engine import advice, weights
from worker.engine.gguf import bundle, choices, library, metadata
from worker.engine.gguf.vocabulary import Vocabulary
from worker.engine.runner import ModelError
from worker.engine.settings import EngineSettings

_LARGEST_TOKENIZER = 64 * 1024 * 1024
_MOST_DEVICES = 128
"""More than llama.cpp can use: it reads as many shares as it has devices."""


class GgufModel:
    """A loaded model. `progress` is told how much is loaded, from 0 to 1. Raises ModelError."""

    def __init__(self, found: weights.Found, settings: EngineSettings, progress: Callable[[float], None]) -> None:
        self.found = found
        self.facts = metadata.read(found.weights)
        self.advised = advice.read(found.sidecars, self.facts.sampling_defaults())
        self.handle = _load(found.weights, settings, progress)
        vocab = llama.llama_model_get_vocab(self.handle)
        assert vocab is not None
        self.vocabulary = Vocabulary(vocab, self.facts)
        self.bundle = bundle.build(self.facts, self.vocabulary, _published_tokenizer(found))

    def __repr__(self) -> str:
        return f"<GgufModel {self.found.weights}>"

    def close(self) -> None:
        """Gives its memory back. No context may use it any more."""
        llama.llama_model_free(self.handle)


class _Key(NamedTuple):
    """What two replicas must have in common to share a model."""

    weights: Path
    gpu_layers: int
    split_mode: str
    main_gpu: int
    tensor_split: tuple[float, ...]


class Models:
    """The models of a process: each is in memory once, for as long as somebody uses it. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[_Key, GgufModel] = {}
        self._users: dict[_Key, int] = {}

    def __repr__(self) -> str:
        return f"<Models {list(self._models.values())}>"

    def use(self, found: weights.Found, settings: EngineSettings, progress: Callable[[float], None]) -> GgufModel:
        """A model for one more user, who gives it back by `release`. Raises ModelError."""
        key = _key(found, settings)
        with self._lock:
            if key not in self._models:
                self._models[key] = GgufModel(found, settings, progress)
            self._users[key] = self._users.get(key, 0) + 1
            return self._models[key]

    def release(self, model: GgufModel) -> None:
        """One user less; the last one's going frees the memory."""
        with self._lock:
            key = next(key for key, known in self._models.items() if known is model)
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._models.pop(key).close()


def _published_tokenizer(found: weights.Found) -> bytes | None:
    path = found.sidecars.get("tokenizer.json")
    if path is None or path.stat().st_size > _LARGEST_TOKENIZER:
        return None
    return path.read_bytes()


def _key(found: weights.Found, settings: EngineSettings) -> _Key:
    path = found.weights.resolve()
    return _Key(path, settings.gpu_layers, settings.split_mode, settings.main_gpu, settings.tensor_split)


def _load(path: Path, settings: EngineSettings, progress: Callable[[float], None]) -> llama.llama_model_p:
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 999 if settings.gpu_layers < 0 else settings.gpu_layers
    params.split_mode = choices.SPLIT_MODES[settings.split_mode]
    params.main_gpu = settings.main_gpu
    if settings.tensor_split:
        params.tensor_split = (ctypes.c_float * _MOST_DEVICES)(*settings.tensor_split)

    def report(fraction: float, _: ctypes.c_void_p) -> bool:
        progress(fraction)
        return True

    params.progress_callback = llama.llama_progress_callback(report)
    model: llama.llama_model_p | None = llama.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise ModelError(f"{path}: {_what_to_do(library.last_error())}")
    return model


def _what_to_do(complaint: str) -> str:
    """llama.cpp's reason for not loading a file, and what may help."""
    reason = complaint.rpartition("error loading model: ")[2]
    if "unknown model architecture" in reason:
        return f"{reason}; llama-cpp-python {llama_cpp.__version__} can't run it, a later version may"
    if "file bounds" in reason or "corrupt" in reason:
        return f"{reason}; fetch the file again"
    return f"llama.cpp can't load it: {reason}"
