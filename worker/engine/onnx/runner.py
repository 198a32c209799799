"""Executes step plans with onnxruntime: one run for all that decode, and one for each share of a prompt."""

import os
from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np
import onnxruntime
import structlog

from tokenbus.protocol.wire import internal
from tokenbus.worker import contract
from tokenbus.worker.engine.kv.ops import KvOp, Truncate
from tokenbus.worker.engine.models import features, model_files
from tokenbus.worker.engine.onnx import probe, row_memory, settings_resolution
from tokenbus.worker.engine.onnx.arrays import Array
from tokenbus.worker.engine.onnx.cache.dynamic_cache import DynamicCache
from tokenbus.worker.engine.onnx.cache.kv_cache import DecodeResult, KvCache
from tokenbus.worker.engine.onnx.cache.lanes import LaneLengths, Shrink
from tokenbus.worker.engine.onnx.cache.static_cache import StaticCache
from tokenbus.worker.engine.onnx.embedder import make_embedder
from tokenbus.worker.engine.onnx.graphs.session import Device
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import DeviceError, Embedder, InsufficientMemoryError, ModelError
from tokenbus.worker.engine.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import SampledToken, ScheduledTokens, StepPlan
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason


class OnnxRunner:
    """The cache of one replica over a loaded model that generates; `release` gives the model back.

    Raises ModelError for settings that the model or the machine can't meet, and for a graph that has no batches."""

    def __init__(self, model: OnnxModel, settings: EngineSettings, dev: Device, release: Callable[[], None]) -> None:
        self._model = model
        self._device = dev
        self._release = release
        self._tokenizer = model.tokenizer
        self.end_token_ids = self._tokenizer.end_token_ids | model.generation_config.end_token_ids
        self.token_bytes = self._tokenizer.token_bytes
        self.bundle: bytes | None = self._tokenizer.bundle
        self._min_free_bytes = settings.onnx.min_free_mib << 20
        limits = settings_resolution.CacheLimits(_trained(model), self._bytes_per_token(), row_memory.free_bytes(dev))
        cache_size = settings_resolution.size_cache(settings, model.generation_config, limits)
        self.num_lanes = cache_size.num_rows
        self._sampler = Sampler(self.end_token_ids, self._tokenizer.size)
        self._lanes = LaneLengths(cache_size.num_rows)
        self._cache = self._make_cache(settings, cache_size)
        self.embedder = self._make_embedder(settings, cache_size)
        self.config = self._describe(settings, cache_size)

    def __repr__(self) -> str:
        return f"<OnnxRunner {self.config.source} {self._cache!r}>"

    def add_sequence(self, seq_no: int, sampling: contract.Sampling) -> None:
        self._sampler.add_sequence(seq_no, sampling)

    def remove_sequence(self, seq_no: int) -> None:
        self._sampler.remove_sequence(seq_no)

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        try:
            self._cache.apply(self._lanes.resolve(kv_ops))
        except InsufficientMemoryError as error:  # lanes are halfway, and nobody could say where
            raise DeviceError(str(error)) from error

    def step(self, plan: StepPlan) -> list[SampledToken | EngineFinishReason]:
        try:
            computed = self._compute(plan)
        except InsufficientMemoryError:
            self._undo(plan)
            raise
        parts = [part for decoded in computed for part in decoded.parts]
        if not parts:
            return []
        matrices = [decoded.logits for decoded in computed]
        logits = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        chosen = self._sampler.sample(logits, [part.sequence for part in parts])
        by_lane = dict(zip([part.lane for part in parts], chosen, strict=True))
        return [by_lane[part.lane] for part in plan.scheduled if part.samples]

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._tokenizer.tokenize(request)

    def close(self) -> None:
        self._release()

    def _compute(self, plan: StepPlan) -> list[DecodeResult]:
        """The logits behind each part that samples, as they come."""
        decodes = [part for part in plan.scheduled if _can_share_a_run(part)]
        prompts = [part for part in plan.scheduled if not _can_share_a_run(part)]
        if prompts:
            self._check_memory()
        found: list[DecodeResult] = []
        if decodes:
            found.append(self._cache.decode(decodes))
            self._note(decodes)
        for part in prompts:
            logits = self._prompt(part)
            self._note([part])
            if part.samples:
                found.append(DecodeResult([part], logits))
        return found

    def _undo(self, plan: StepPlan) -> None:
        """Has lanes give up what a step computed before it found no room: it will be computed again."""
        self._lanes.resolve([Truncate(part.lane, part.start) for part in plan.scheduled])
        self._cache.apply(
            [Shrink(part.lane, part.start) for part in plan.scheduled]
        )  # the cache may be ahead of the lanes

    def _prompt(self, part: ScheduledTokens) -> Array:
        """In pieces, where the graph computes the logits of every token."""
        most, end = self._model.graph_runner.max_row_tokens, part.start + part.num_tokens
        for start in range(part.start, end, most):
            piece = ScheduledTokens(part.sequence, start, min(most, end - start))
            logits = self._cache.prompt(piece, wants_logits=piece.samples)
        return logits

    def _note(self, parts: list[ScheduledTokens]) -> None:
        for part in parts:
            self._lanes.grow(part.lane, part.start, part.start + part.num_tokens)

    def _check_memory(self) -> None:
        """Raises InsufficientMemoryError where a prompt could take what the streams that run need."""
        free = row_memory.free_bytes(self._device) if self._min_free_bytes else None
        if free is not None and free < self._min_free_bytes:
            structlog.get_logger().error("memory_low", free_bytes=free, min_free_bytes=self._min_free_bytes)
            raise InsufficientMemoryError(f"{free} bytes are free, --min-free-mib wants {self._min_free_bytes}")

    def _make_embedder(self, settings: EngineSettings, cache_size: settings_resolution.CacheSize) -> Embedder | None:
        """None where the graph shows no states, or can't compute a whole text at once: it generates all the same."""
        if self._model.graph.hidden is None:
            return None
        try:
            return make_embedder(self._model, settings, max_input_tokens=cache_size.context_length)
        except ModelError as error:
            structlog.get_logger().info("no_embeddings", reason=str(error))
            return None

    def _make_cache(self, settings: EngineSettings, cache_size: settings_resolution.CacheSize) -> KvCache:
        """Raises ModelError where there is no memory for it, or where batches compute something else."""
        model, where = self._model, str(self._model.files.weights)
        if model.graph.uses_gqa:
            made: KvCache = self._make_static_cache(self._lanes, cache_size.context_length)
            lanes = LaneLengths(probe.LANES)
            if probe.batches_agree(self._make_static_cache(lanes, probe.TOKENS), lanes, self._tokenizer.size, where):
                return made
        else:
            paddings = settings_resolution.max_paddings(settings, model.generation_config)
            for allow_gaps in (True, False) if model.graph.positions is not None else (False,):
                tried = DynamicCache(model.graph_runner, probe.PADDINGS, allow_gaps=allow_gaps)
                if probe.batches_agree(tried, LaneLengths(probe.LANES), self._tokenizer.size, where):
                    return DynamicCache(model.graph_runner, paddings, allow_gaps=allow_gaps)
        raise ModelError(
            f"{where}: computes something else in a batch than alone, so that requests would disturb each other; "
            "take another of its files (those of int8 scale a batch as a whole), export it anew, with a dynamic batch "
            "axis and attention_mask, or take its GGUF"
        )

    def _make_static_cache(self, lanes: LaneLengths, context_length: int) -> StaticCache:
        num_rows = len(lanes.lengths) + 1
        try:
            memory = row_memory.allocate_rows(self._model.graph.kv, num_rows, context_length, self._device)
        except Exception as error:  # a GPU without room makes onnxruntime raise a class of its own
            size = num_rows * context_length * self._bytes_per_token()
            raise ModelError(
                f"there is no memory for a cache of {size} bytes: pass a smaller --context-length or --max-num-seqs"
            ) from error
        return StaticCache(self._model.graph_runner, memory, lanes)

    def _bytes_per_token(self) -> int:
        """Plain attention needs the cache twice: a run reads the one and writes the other."""
        graph = self._model.graph
        return graph.bytes_per_token * (1 if graph.uses_gqa else 2)

    def _describe(self, settings: EngineSettings, cache_size: settings_resolution.CacheSize) -> contract.EngineConfig:
        model = self._model
        offered = features.with_sampler(chat=self._tokenizer.supports_chat)
        if self.embedder is not None:
            offered += ("embed",)
        return contract.EngineConfig(
            engine="onnx",
            engine_version=f"onnxruntime {onnxruntime.__version__} on {self._device.kind}",
            source=model_files.source_name(settings.model),
            fingerprint=settings.fingerprint or model.fingerprint,
            context_length=cache_size.context_length,
            max_num_seqs=cache_size.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=cache_size.block_size,
            total_kv_blocks=cache_size.total_blocks,
            prefix_cache=True,
            vocab_size=self._tokenizer.size,
            features=offered,
            defaults=model.generation_config.defaults,
            versions={"onnxruntime": onnxruntime.__version__},
            pid=os.getpid(),
            files=model_files.to_paths(model.files),
            kv_bytes=cache_size.num_rows * cache_size.context_length * self._bytes_per_token(),
            embedding_width=self.embedder.width if self.embedder is not None else 0,
        )


def _can_share_a_run(part: ScheduledTokens) -> bool:
    """Whether it is one token behind others."""
    return part.num_tokens == 1 and part.start > 0 and part.samples


def _trained(model: OnnxModel) -> int | None:
    """Tokens of one sequence; a plain graph takes columns for places, so that none may be as far off as its window."""
    trained, window = model.model_config.context_length, model.model_config.sliding_window
    if model.graph.uses_gqa or window is None:
        return trained
    return window if trained is None else min(trained, window)
