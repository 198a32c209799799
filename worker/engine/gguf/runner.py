"""Executes step plans with llama.cpp: one context, and one of its sequences for each lane."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import ctypes
import os
from collections.abc import Callable
from collections.abc import Sequence as Listing
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as llama

from protocol import internal
from worker import contract
from worker.engine import advice, weights
from worker.engine.gguf import bundle, choices, context, library, metadata, probe
from worker.engine.gguf.batch import Batch
from worker.engine.gguf.lanes import Lanes
from worker.engine.gguf.vocabulary import Vocabulary
from worker.engine.moves import Move
from worker.engine.plan import Sampled, StepPlan
from worker.engine.runner import DeviceError, ModelError, NoRoomError
from worker.engine.sampler import Sampler
from worker.engine.sequence import End
from worker.engine.settings import EngineSettings

FEATURES = (
    "generate",
    "chat",
    "stop",
    "seed",
    "return_token_ids",
    "logprobs",
    "penalties",
    "logit_bias",
    "progress",
)
_MOST_DEVICES = 128
"""More than llama.cpp can use: it reads as many shares as it has devices."""
_MOST_HOST_BLOCKS = 65_536
"""The tree that finds them takes about 1 kB of memory for each."""
_CHOSEN_HOST_BYTES = 1 << 30
_CHOSEN_HOST_SHARE = 8
"""Of the machine's memory, at most, one in so many bytes unless a setting says otherwise."""


class GgufRunner:
    """A loaded model and its context. `progress` is told how much is loaded, from 0 to 1.

    Raises ModelError when the file can't be served, and for settings that the model can't meet."""

    def __init__(self, settings: EngineSettings, progress: Callable[[float], None]) -> None:
        library.start()
        choices.check(settings)
        found = weights.from_files(settings.files) or weights.find(settings.model, progress)
        path = found.weights
        facts = metadata.read(path)
        advised = advice.read(found.sidecars, facts.sampling_defaults())
        settings = choices.choose(settings, advised)
        choices.check(settings)
        self._context: llama.llama_context_p | None = None
        self._model = _load(path, settings, progress)
        vocab = llama.llama_model_get_vocab(self._model)
        assert vocab is not None
        self._vocabulary = Vocabulary(vocab, facts)
        self._context = context.make(self._model, settings)
        first_lane = context.first_lane(self._model, settings)
        self._batch = Batch(settings.max_num_batched_tokens, first_lane)
        self.end_token_ids = self._vocabulary.end_token_ids | advised.end_token_ids
        self.pieces = self._vocabulary.pieces
        self.bundle = bundle.build(facts, self._vocabulary)
        self._sampler = Sampler(self.end_token_ids, self._vocabulary.size)
        identity = f"{facts.fingerprint}:{settings.cache_type_k}:{settings.cache_type_v}:{llama_cpp.__version__}"
        self._lanes = Lanes(self._context, identity, first_lane)
        abilities = probe.run(self._model, self._context, self._lanes, settings)
        self.num_lanes = context.num_lanes(self._model, settings)
        self._files = weights.to_files(found)
        self.config = self._describe(facts, settings, abilities, advised.defaults)
        self._check_room(settings)

    def __repr__(self) -> str:
        return f"<GgufRunner {self.config.source} {self._sampler!r} {self._lanes!r}>"

    def begin(self, seq_no: int, sampling: contract.Sampling) -> None:
        self._sampler.begin(seq_no, sampling)

    def finish(self, seq_no: int) -> None:
        self._sampler.finish(seq_no)

    def apply(self, moves: Listing[Move]) -> None:
        self._lanes.apply(moves)

    def step(self, plan: StepPlan) -> list[Sampled | End]:
        self._batch.fill(plan.parts)
        self._decode()
        sequences = [part.sequence for part in plan.parts if part.samples]
        if not sequences:
            return []
        assert self._context is not None
        size = self._vocabulary.size
        logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), (len(sequences), size))
        return self._sampler.choose(logits, sequences)

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._vocabulary.tokenize(request)

    def close(self) -> None:
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

    def _describe(
        self,
        facts: metadata.Metadata,
        settings: EngineSettings,
        abilities: probe.Abilities,
        defaults: contract.SamplingDefaults,
    ) -> contract.EngineConfig:
        assert self._context is not None
        blocks = llama.llama_n_ctx(self._context) // settings.kv_block_size
        longest = context.context_length(settings, llama.llama_model_n_ctx_train(self._model))
        fits = llama.llama_n_ctx_seq(self._context) // settings.kv_block_size * settings.kv_block_size
        chat = facts.text("tokenizer.chat_template") is not None
        return contract.EngineConfig(
            engine="gguf",
            engine_version=f"llama-cpp-python {llama_cpp.__version__}",
            source=settings.model if weights.is_hub_name(settings.model) else Path(settings.model).name,
            fingerprint=facts.fingerprint,
            context_length=min(longest, fits),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=settings.kv_block_size,
            total_kv_blocks=blocks,
            host_kv_blocks=_host_blocks(settings, abilities),
            prefix_cache=abilities.can_share,
            vocab_size=self._vocabulary.size,
            features=tuple(feature for feature in FEATURES if chat or feature != "chat"),
            defaults=defaults,
            versions={"llama_cpp_python": llama_cpp.__version__},
            pid=os.getpid(),
            files=self._files,
        )

    def _check_room(self, settings: EngineSettings) -> None:
        """Raises ModelError where a sequence of the length that was asked for could never be served."""
        if settings.context_length > self.config.context_length:
            raise ModelError(
                f"--context-length {settings.context_length} is above what one sequence can have here, "
                f"{self.config.context_length}: pass more --kv-tokens"
            )


def _host_blocks(settings: EngineSettings, abilities: probe.Abilities) -> int:
    if not abilities.can_share or not abilities.bytes_per_token:
        return 0
    budget = settings.host_cache_mib << 20
    if settings.host_cache_mib < 0:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = min(_CHOSEN_HOST_BYTES, memory // _CHOSEN_HOST_SHARE)
    return min(_MOST_HOST_BLOCKS, budget // (abilities.bytes_per_token * settings.kv_block_size))


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
