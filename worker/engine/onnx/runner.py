"""Executes step plans with onnxruntime: one run for all sequences that decode with the same adapters, and one for each
part of a prompt."""

from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np
import onnxruntime
import structlog

from tokenbus.protocol.process import memory
from tokenbus.protocol.wire import codec
from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device import non_finite, row_scores
from tokenbus.worker.engine.device.generating_runner import GeneratingRunner
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.device.runner import Embedder, Runner, RunnerAdapters
from tokenbus.worker.engine.host_cache import slot_store
from tokenbus.worker.engine.host_cache.slot_store import SlotStore, kv_identity
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.memory.planner import MemoryPlanner
from tokenbus.worker.engine.onnx import device, embedder, kv_cache, probe, settings_resolution, static_cache
from tokenbus.worker.engine.onnx.adapters import ReplicaAdapters
from tokenbus.worker.engine.onnx.dynamic_cache import DynamicCache
from tokenbus.worker.engine.onnx.graph import Array
from tokenbus.worker.engine.onnx.kv_cache import DecodeGroup, DecodeResult, KvCache, LaneLengths, OwnLanes
from tokenbus.worker.engine.onnx.model import OnnxModel, model_key
from tokenbus.worker.engine.onnx.model_facts import SCORED_ROWS, embed_tokens
from tokenbus.worker.engine.onnx.session import NO_ADAPTERS, AdapterInputs
from tokenbus.worker.engine.onnx.settings_resolution import CacheSize
from tokenbus.worker.engine.onnx.static_cache import StaticCache
from tokenbus.worker.engine.scheduling.plan import Outcome, ScheduledTokens, StepPlan, Undone
from tokenbus.worker.engine.settings_resolution import resolve
from tokenbus.worker.files.layouts import OnnxLayout
from tokenbus.worker.files.model_files import ModelFiles
from tokenbus.worker.models import registry


def load(
    settings: EngineSettings,
    progress: Callable[[float], None],
    models: LoadedModels[OnnxModel],
    planner: MemoryPlanner | None = None,
    begin: Callable[[], None] = lambda: None,
) -> Runner:
    """Returns a runner over a model that replicas share. `progress` gets the fraction loaded, from 0 to 1. `begin` is
    called when the files are there.

    Raises ModelError if the files can't be served, or for settings that the model or the machine can't meet."""
    settings_resolution.validate(settings)
    chosen = device.choose(settings)
    layout = OnnxLayout(on_gpu=chosen.kind != "cpu")
    files = ModelFiles.from_paths(settings.files) or registry.find_as(
        settings.model, (layout,), progress, follow_links=settings.follow_links
    )
    planner = planner or MemoryPlanner()
    begin()
    model = models.acquire(model_key(files, settings, chosen), lambda: OnnxModel(files, settings, chosen, planner))
    try:
        return _open(model, settings, planner, lambda: models.release(model))
    except BaseException:
        models.release(model)
        raise


def _open(model: OnnxModel, settings: EngineSettings, planner: MemoryPlanner, release: Callable[[], None]) -> Runner:
    """Returns a replica with the sizes that memory allows."""
    resolved = resolve(settings, model.generation_config, max_num_seqs=settings_resolution.MAX_ROWS)
    settings_resolution.validate(resolved)
    # sequences that were not asked for are as many as fit
    resolved = codec.replace(resolved, max_num_seqs=settings.max_num_seqs, kv_block_size=settings.kv_block_size)
    planned = planner.plan_replica(model.memory, model.placement, resolved)

    def release_all() -> None:
        planner.claims.release(planned.part)
        release()

    make = embedder.make_runner if model.graph.logits is None else OnnxRunner
    try:
        runner: Runner = make(model, planned.settings, release_all)
    except BaseException:
        planner.claims.release(planned.part)
        raise
    planner.claims.took(planned.part)
    runner.config = codec.replace(runner.config, memory=planned.memory)
    return runner


def lends_lanes(settings: EngineSettings) -> bool:
    """Whether a replica with these settings can lend its lanes, whose memory is allocated only as it is used.

    A GPU's memory is one piece, which can't shrink while graphs are bound to it. Raises ModelError."""
    return device.choose(settings).kind == "cpu"


class OnnxRunner(GeneratingRunner):
    """The cache of one replica over a loaded model that generates. `release` is called once the model isn't needed.

    Raises ModelError for settings that the model or the machine can't meet, and for a graph that can't batch."""

    def __init__(self, model: OnnxModel, settings: EngineSettings, release: Callable[[], None]) -> None:
        super().__init__(model)
        self._model = model
        self._release = release
        self.bundle: bytes | None = model.tokenizer.bundle
        self._min_free_bytes = settings.onnx.min_free_mib << 20
        limits = settings_resolution.CacheLimits(
            model.memory.known.trained_context or None,
            model.memory.known.bytes_per_token,
            settings.kv_pool_bytes if model.device.kind == "cpu" else 0,
            model.memory.known.padding_tokens(settings),
            model.memory.known.has_own_rows(settings),
        )
        size = settings_resolution.size_cache(settings, model.generation_config, limits)
        self.num_lanes = size.num_rows
        self.canary: Listing[int] = probe.canary(self._tokenizer.size)
        self._lanes = LaneLengths(size.num_rows)
        self._cache = self._make_cache(settings, size)
        most_tokens = size.kv_tokens + model.memory.known.padding_tokens(settings)
        self.own_lanes = OwnLanes(self._cache, self._lanes, most_tokens, size.context_length)
        self._missing: dict[str, str] = {}
        self.embedder = self._make_embedder(settings, size)
        self._takes_adapters = model.takes_adapters
        self._adapters = ReplicaAdapters(model, self._cache.drop_bindings) if model.projections else None
        self.adapters: RunnerAdapters | None = self._adapters
        offered = self._offered(self._missing, lora=self.adapters is not None)
        self.kv_identity = _identity(model, size)
        self.copies = self._make_store(settings, size)
        self.config = codec.replace(
            model.describe(settings, size, offered, self.embedder),
            host_kv_blocks=0 if self.copies is None else self.copies.layout.num_slots,
            writes_through=True,
            idle_blocks_cost=False,
            kv_lane_bytes=size.context_length * model.memory.known.bytes_per_token if model.device.kind == "cpu" else 0,
            missing=self._missing,
        )

    def __repr__(self) -> str:
        return f"<OnnxRunner {self.config.source} {self._cache!r}>"

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        try:
            kv_cache.apply_changes(self._lanes.resolve(kv_ops), self._cache, self.copies)
        except InsufficientMemoryError as error:  # some of the changes are done, and it is unknown which
            raise DeviceError(str(error)) from error

    def release_lanes(self) -> None:
        if self._cache.release_lanes():
            memory.trim_heap()

    def step(self, plan: StepPlan) -> list[Outcome]:
        if self._takes_adapters is not self._model.takes_adapters:  # the session of these bindings was replaced
            self._takes_adapters = True
            self._cache.drop_bindings()
        decodes = [part for part in plan.scheduled if _is_decode(part)]
        outcomes = self._outcomes(decodes)
        for part in plan.scheduled:
            if not _is_decode(part):
                outcomes |= self._outcomes([part])
        return [outcomes[part.lane] for part in plan.scheduled]

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        del self._cache
        self._release()

    def _outcomes(self, parts: list[ScheduledTokens]) -> dict[int, Outcome]:
        """Computes parts and samples; returns the outcome for each lane. Whatever is not done is rolled back."""
        outcomes: dict[int, Outcome] = {}
        try:
            for in_rows, logits in self._compute(parts):
                outcomes |= non_finite.sort_out(in_rows, logits, self._sampler, self.logits)
        except InsufficientMemoryError as error:
            structlog.get_logger().warning("onnxruntime", text=str(error))
            outcomes = {part.lane: Undone.NO_ROOM for part in parts}
        for part in parts:
            if isinstance(outcomes[part.lane], Undone):  # the cache may be ahead of the lengths
                self.prompt_scores.discard(part.sequence)
                self._cache.erase(part.lane, part.start)
            else:
                self._lanes.grow(part.lane, part.start, part.start + part.num_tokens)
        return outcomes

    def _compute(self, parts: list[ScheduledTokens]) -> list[DecodeResult]:
        """Returns the logits after each part, in the order in which they were computed."""
        if not all(map(_is_decode, parts)):
            self._check_memory()
            return [DecodeResult([part], self._prompt(part)) for part in parts]
        # Always in the same order, so that rows stay in place.
        batches = sorted(StepPlan(tuple(parts)).batches(), key=lambda batch: batch[0].sequence.adapters)
        return self._cache.decode([DecodeGroup(batch, self._inputs_for(batch[0])) for batch in batches])

    def _prompt(self, part: ScheduledTokens) -> Array:
        """Computes a part of a prompt; returns the logits after its last token. That takes several runs if the graph
        computes the logits of every token, or if many are needed for log probabilities."""
        end, first = part.start + part.num_tokens, part.first_row
        most = min(self._model.graph_runner.max_row_tokens, self._model.memory.max_run_tokens(end))
        adapters = self._inputs_for(part)
        start, is_poisoned = part.start, False
        while start < end:
            stop = min(end, start + most)
            num_rows = int(stop == end)
            if first is not None and first < stop:
                stop = min(stop, max(start, first) + SCORED_ROWS)
                num_rows = stop - max(start, first)
            chunk = ScheduledTokens(part.sequence, start, stop - start)
            logits = self._cache.prompt(chunk, num_logits=num_rows, adapters=adapters)
            if first is not None and num_rows and not is_poisoned:
                is_poisoned = any(non_finite.are_poisoned(logits))
                if not is_poisoned:
                    self.prompt_scores.add(part.sequence, stop - num_rows, stop, row_scores.packer(logits))
            start = stop
        last = logits[-1:]
        return np.full_like(last, np.nan) if is_poisoned else last

    def _inputs_for(self, part: ScheduledTokens) -> AdapterInputs:
        used = part.sequence.adapters
        assert self._adapters is not None or not used, part
        return NO_ADAPTERS if self._adapters is None else self._adapters.inputs_of(used)

    def _check_memory(self) -> None:
        """Raises InsufficientMemoryError if a prompt could take the memory that running streams need."""
        free = device.free_bytes(self._model.device) if self._min_free_bytes else None
        if free is not None and free < self._min_free_bytes:
            structlog.get_logger().error("memory_low", free_bytes=free, min_free_bytes=self._min_free_bytes)
            raise InsufficientMemoryError(f"{free} bytes are free, --min-free-mib requires {self._min_free_bytes}")

    def _make_embedder(self, settings: EngineSettings, size: CacheSize) -> Embedder | None:
        """Returns None if the graph can't compute embeddings, or shouldn't; it can still generate."""
        if self._model.graph.hidden is None or settings.pooling == "none":
            return None
        try:
            return embedder.OnnxEmbedder(
                self._model, settings, max_input_tokens=embed_tokens(settings, size.context_length)
            )
        except ModelError as error:
            self._missing["embeddings"] = str(error)
            return None

    def _make_cache(self, settings: EngineSettings, size: CacheSize) -> KvCache:
        """Raises ModelError if there is not enough memory, or if the graph computes different results in batches."""
        model, where = self._model, str(self._model.files.weights)
        if model.graph.uses_gqa:
            made = self._make_static_cache(self._lanes, size.context_length)
            lanes = LaneLengths(probe.LANES)
            trial = self._make_static_cache(lanes, probe.TOKENS)
            if probe.batches_agree(trial, lanes, self._tokenizer.size, where):
                return made
        else:
            paddings = settings_resolution.max_paddings(settings, model.generation_config)
            # A graph that ignores its mask can still batch rows of equal length.
            for allow_gaps in (True, False) if model.graph.positions is not None else (False,):
                tried = DynamicCache(model.graph_runner, probe.PADDINGS, allow_gaps=allow_gaps)
                if probe.batches_agree(tried, LaneLengths(probe.LANES), self._tokenizer.size, where):
                    return DynamicCache(model.graph_runner, paddings, allow_gaps=allow_gaps)
        raise ModelError(
            f"{where}: computes different results in a batch than alone, so that requests would affect each other; "
            "take another of its files (those of int8 scale a batch as a whole), export it again, with a dynamic batch "
            "axis and attention_mask, or take its GGUF"
        )

    def _make_store(self, settings: EngineSettings, size: CacheSize) -> SlotStore | None:
        """Returns a store for copies of blocks, or None if the cache is not in host memory or no store is wanted."""
        if self._model.device.kind != "cpu":
            return None
        token_bytes = kv_cache.bytes_per_token(self._model.graph.kv)

        def find_problem(data: memoryview, start: int, count: int) -> str:
            if len(data) != count * token_bytes:
                return "size"
            return "" if kv_cache.is_finite(self._model.graph.kv, data) else "numbers"

        block_bytes = size.block_size * token_bytes
        return slot_store.make_store(self.kv_identity, size.block_size, block_bytes, settings, find_problem)

    def _make_static_cache(self, lanes: LaneLengths, context_length: int) -> StaticCache:
        num_rows = len(lanes.lengths) + 1  # one is the spare row
        try:
            memory = static_cache.allocate_rows(self._model.graph.kv, num_rows, context_length, self._model.device)
        except Exception as error:  # without room on a GPU, onnxruntime raises its own class
            size = num_rows * context_length * self._model.memory.known.bytes_per_token
            raise ModelError(
                f"there is no memory for a cache of {size} bytes: pass a smaller --context-length or --max-num-seqs"
            ) from error
        return StaticCache(self._model.graph_runner, memory, lanes, is_releasable=self._model.device.kind == "cpu")


def _identity(model: OnnxModel, size: CacheSize) -> str:
    """Returns the identity of a model's keys and values, which both kinds of cache save in the same way."""
    types = ",".join(sorted({one.dtype.name for one in model.graph.kv}))
    return kv_identity(model.fingerprint, types, f"onnxruntime {onnxruntime.__version__}", size.block_size)


def _is_decode(part: ScheduledTokens) -> bool:
    """Whether a part is one token after others, which can share a run with other sequences' tokens."""
    return part.num_tokens == 1 and part.start > 0 and part.samples
