"""Executes step plans with llama.cpp: one context with a unified KV memory, one lane for each sequence."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as llama

from protocol import internal
from worker import contract
from worker.engine.gguf import bundle, library, metadata
from worker.engine.gguf.batch import Batch
from worker.engine.gguf.sampler import LaneSampler
from worker.engine.gguf.vocabulary import Vocabulary
from worker.engine.plan import Part, StepPlan
from worker.engine.runner import DeviceError, ModelError, NoRoomError
from worker.engine.sequence import End
from worker.engine.settings import EngineSettings

FEATURES = ("generate", "chat", "stop", "seed", "return_token_ids")
_LONGEST_CHOSEN_CONTEXT = 8_192
_LARGEST_CHOSEN_KV = 16_384
_UBATCH = 512


class GgufRunner:
    """A loaded model and its context. `progress` is told how much is loaded, from 0 to 1.

    Raises ModelError when the file can't be served, and for settings that the model can't meet."""

    def __init__(self, settings: EngineSettings, progress: Callable[[float], None]) -> None:
        library.start()
        path = Path(settings.model)
        facts = metadata.read(path)
        self._context: llama.llama_context_p | None = None
        self._model = _load(path, settings, progress)
        vocab = llama.llama_model_get_vocab(self._model)
        assert vocab is not None
        self._vocabulary = Vocabulary(vocab, facts)
        self._context = _make_context(self._model, settings)
        self._memory = llama.llama_get_memory(self._context)
        self._batch = Batch(settings.max_num_batched_tokens)
        self._samplers: dict[int, LaneSampler] = {}
        self.end_token_ids = self._vocabulary.end_token_ids
        self.pieces = self._vocabulary.pieces
        self.bundle = bundle.build(facts, self._vocabulary)
        self.config = self._describe(path, facts, settings)
        self._warm_up()

    def __repr__(self) -> str:
        return f"<GgufRunner {self.config.source} {len(self._samplers)} lanes>"

    def begin(self, lane: int, sampling: contract.Sampling) -> None:
        assert lane not in self._samplers, lane
        self._samplers[lane] = LaneSampler(sampling, self.end_token_ids)

    def release(self, lane: int) -> None:
        self._samplers.pop(lane).close()
        llama.llama_memory_seq_rm(self._memory, lane, -1, -1)

    def step(self, plan: StepPlan) -> list[int | End]:
        places = self._batch.fill(plan.parts)
        self._decode()
        sampling_parts = [part for part in plan.parts if part.samples]
        return self._sample(sampling_parts, places) if places else []

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._vocabulary.tokenize(request)

    def close(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()
        self._samplers.clear()
        if self._context is not None:
            llama.llama_free(self._context)
            llama.llama_model_free(self._model)
            self._context = None

    def _decode(self) -> None:
        assert self._context is not None
        status = llama.llama_decode(self._context, self._batch.struct)
        if status == 1:
            raise NoRoomError
        if status != 0:
            raise DeviceError(f"llama_decode returned {status}: {library.last_error()}")

    def _sample(self, parts: list[Part], places: list[int]) -> list[int | End]:
        assert self._context is not None
        logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), (len(parts), self._vocabulary.size))
        for row, part in zip(logits, parts, strict=True):
            self._samplers[part.lane].forbid(row, may_stop=part.sequence.may_stop)
        best = logits.argmax(axis=1)
        finite = np.isfinite(logits[np.arange(len(parts)), best])
        results: list[int | End] = []
        for part, place, greedy, is_finite in zip(parts, places, best.tolist(), finite.tolist(), strict=True):
            sampler = self._samplers[part.lane]
            results.append(sampler.choose(self._context, place, greedy) if is_finite else End.BAD_LOGITS)
        return results

    def _describe(self, path: Path, facts: metadata.Metadata, settings: EngineSettings) -> contract.EngineConfig:
        assert self._context is not None
        kv_tokens = llama.llama_n_ctx(self._context)
        trained = llama.llama_model_n_ctx_train(self._model)
        blocks = kv_tokens // settings.kv_block_size
        chat = facts.text("tokenizer.chat_template") is not None
        return contract.EngineConfig(
            engine="gguf",
            engine_version=f"llama-cpp-python {llama_cpp.__version__}",
            source=path.name,
            fingerprint=facts.fingerprint,
            context_length=min(_context_length(settings, trained), blocks * settings.kv_block_size),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=settings.kv_block_size,
            total_kv_blocks=blocks,
            prefix_cache=False,
            vocab_size=self._vocabulary.size,
            features=tuple(feature for feature in FEATURES if chat or feature != "chat"),
            defaults=contract.SamplingDefaults(),
            versions={"llama_cpp_python": llama_cpp.__version__},
            pid=os.getpid(),
        )

    def _warm_up(self) -> None:
        """Computes a few tokens, so that the first request does not pay for what llama.cpp allocates lazily."""
        assert self._context is not None
        count = min(16, self._vocabulary.size, self.config.context_length)
        tokens = (llama.llama_token * count)(*range(count))
        status = llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, count))
        if status != 0:
            raise ModelError(f"{self.config.source}: llama.cpp can't compute a first step: {library.last_error()}")
        llama.llama_memory_clear(self._memory, False)


def _load(path: Path, settings: EngineSettings, progress: Callable[[float], None]) -> llama.llama_model_p:
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 999 if settings.gpu_layers < 0 else settings.gpu_layers

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


def _make_context(model: llama.llama_model_p, settings: EngineSettings) -> llama.llama_context_p:
    check(settings)
    context_length = _context_length(settings, llama.llama_model_n_ctx_train(model))
    threads = settings.threads or len(os.sched_getaffinity(0))
    params = llama.llama_context_default_params()
    params.n_ctx = settings.kv_tokens or max(context_length, min(4 * context_length, _LARGEST_CHOSEN_KV))
    params.n_batch = settings.max_num_batched_tokens
    params.n_ubatch = min(_UBATCH, settings.max_num_batched_tokens)
    params.n_seq_max = settings.max_num_seqs
    params.n_outputs_max = settings.max_num_seqs
    params.n_threads = threads
    params.n_threads_batch = threads
    params.kv_unified = True
    params.no_perf = True
    context: llama.llama_context_p | None = llama.llama_init_from_model(model, params)
    if context is None:
        raise ModelError(
            f"no context of {params.n_ctx} tokens could be made: {library.last_error()}; "
            "pass a smaller --kv-tokens or --context-length"
        )
    return context


def check(settings: EngineSettings) -> None:
    """Raises ModelError naming the setting that can't be met."""
    most_lanes = llama.llama_max_parallel_sequences()
    if not 1 <= settings.max_num_seqs <= most_lanes:
        raise ModelError(f"--max-num-seqs must be 1 to {most_lanes}, got {settings.max_num_seqs}")
    if settings.kv_block_size < 1:
        raise ModelError(f"--kv-block-size must be at least 1, got {settings.kv_block_size}")
    if settings.max_num_batched_tokens <= settings.max_num_seqs:
        raise ModelError(
            f"--max-num-batched-tokens must be above --max-num-seqs ({settings.max_num_seqs}), "
            f"got {settings.max_num_batched_tokens}"
        )
    if settings.kv_tokens and settings.context_length > settings.kv_tokens:
        raise ModelError(f"--context-length {settings.context_length} is above --kv-tokens {settings.kv_tokens}")


def _context_length(settings: EngineSettings, trained: int) -> int:
    return settings.context_length or min(trained, _LONGEST_CHOSEN_CONTEXT)
