"""Executes step plans with llama.cpp: one context, and one of its sequences for each lane."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import os
from collections.abc import Callable
from collections.abc import Sequence as Listing

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as llama

from tokenbus.protocol.wire import internal
from tokenbus.worker import contract
from tokenbus.worker.engine.gguf import choices, context, library, memory, probe
from tokenbus.worker.engine.gguf.batch import Batch
from tokenbus.worker.engine.gguf.lanes import Lanes
from tokenbus.worker.engine.gguf.model import GgufModel, key_of
from tokenbus.worker.engine.kv.moves import Move
from tokenbus.worker.engine.models import features, weights
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.process.sharing import Models
from tokenbus.worker.engine.runner import DeviceError, Embedder, ModelError, NoRoomError
from tokenbus.worker.engine.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import Sampled, StepPlan
from tokenbus.worker.engine.scheduling.sequence import End

_MOST_HOST_BLOCKS = 65_536
"""The tree that finds them takes about 1 kB of memory for each."""
_CHOSEN_HOST_BYTES = 1 << 30
_CHOSEN_HOST_SHARE = 8
"""Of the machine's memory, at most, one in so many bytes unless a setting says otherwise."""


class GgufRunner:
    """A loaded model and its context. `progress` is told how much is loaded, from 0 to 1.

    Raises ModelError when the file can't be served, and for settings that the model can't meet."""

    def __init__(
        self, settings: EngineSettings, progress: Callable[[float], None], models: Models[GgufModel] | None = None
    ) -> None:
        library.start()
        choices.check(settings)
        found = weights.from_files(settings.files) or weights.find(settings.model, progress)
        self._models: Models[GgufModel] = models or Models()
        self._model = self._models.use(key_of(found, settings), lambda: GgufModel(found, settings, progress))
        self._context: llama.llama_context_p | None = None
        self._vocabulary = self._model.vocabulary
        self.end_token_ids = self._vocabulary.end_token_ids | self._model.advised.end_token_ids
        self.pieces = self._vocabulary.pieces
        self.bundle = self._model.bundle
        self.embedder: Embedder | None = None
        try:
            self._open(settings)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<GgufRunner {self.config.source} {self._sampler!r} {self._lanes!r}>"

    def _open(self, settings: EngineSettings) -> None:
        """Makes the context and finds out what it can do."""
        facts, handle = self._model.facts, self._model.handle
        settings = choices.choose(settings, self._model.advised)
        choices.check(settings)
        settings = memory.limit(settings, facts, llama.llama_model_n_ctx_train(handle))
        self._context = context.make(handle, settings)
        first_lane = context.first_lane(handle, settings)
        self._batch = Batch(settings.max_num_batched_tokens, first_lane)
        self._sampler = Sampler(self.end_token_ids, self._vocabulary.size)
        identity = f"{facts.fingerprint}:{settings.cache_type_k}:{settings.cache_type_v}:{llama_cpp.__version__}"
        self._lanes = Lanes(self._context, identity, first_lane)
        abilities = probe.run(handle, self._context, self._lanes, settings)
        self.num_lanes = context.num_lanes(handle, settings)
        self.config = self._describe(settings, abilities)
        self._check_room(settings)

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
            self._context = None
        self._models.release(self._model)

    def _decode(self) -> None:
        assert self._context is not None
        status = llama.llama_decode(self._context, self._batch.struct)
        if status == 1:
            raise NoRoomError
        if status != 0:
            raise DeviceError(f"llama_decode returned {status}: {library.last_error()}")

    def _describe(self, settings: EngineSettings, abilities: probe.Abilities) -> contract.EngineConfig:
        assert self._context is not None
        facts = self._model.facts
        blocks = llama.llama_n_ctx(self._context) // settings.kv_block_size
        longest = context.context_length(settings, llama.llama_model_n_ctx_train(self._model.handle))
        fits = llama.llama_n_ctx_seq(self._context) // settings.kv_block_size * settings.kv_block_size
        chat = self._vocabulary.can_chat
        return contract.EngineConfig(
            engine="gguf",
            engine_version=f"llama-cpp-python {llama_cpp.__version__}",
            source=weights.source_of(settings.model),
            fingerprint=settings.fingerprint or facts.fingerprint,
            context_length=min(longest, fits),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=settings.kv_block_size,
            total_kv_blocks=blocks,
            host_kv_blocks=_host_blocks(settings, abilities),
            prefix_cache=abilities.can_share,
            vocab_size=self._vocabulary.size,
            features=features.of_sampler(chat=chat),
            defaults=self._model.advised.defaults,
            versions={"llama_cpp_python": llama_cpp.__version__},
            pid=os.getpid(),
            files=weights.to_files(self._model.found),
            kv_bytes=llama.llama_n_ctx(self._context) * memory.bytes_per_token(facts, settings),
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
