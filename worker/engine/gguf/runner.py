"""Executes step plans with llama.cpp: one context, in which each lane is one of llama.cpp's sequences."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

from collections.abc import Callable
from collections.abc import Sequence as Listing

import llama_cpp
import msgspec
import numpy as np
import structlog
from llama_cpp import llama_cpp as llama

from tokenbus.protocol.wire import codec
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import DeviceError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.convert import converted
from tokenbus.worker.engine.device import non_finite, row_scores
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.generating_runner import GeneratingRunner
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.gguf import (
    backend,
    context,
    model_facts,
    pooler,
    probe,
    settings_resolution,
    state_blob,
    weight_types,
)
from tokenbus.worker.engine.gguf.adapters import ContextAdapters
from tokenbus.worker.engine.gguf.context import BatchPart, LlamaBatch
from tokenbus.worker.engine.gguf.lanes import FIRST_SEQ_ID, SCRATCH, Lanes
from tokenbus.worker.engine.gguf.model import GgufModel, model_key
from tokenbus.worker.engine.gguf.passes import Piece, to_passes
from tokenbus.worker.engine.gguf.pooler import CausalEmbedder
from tokenbus.worker.engine.host_cache import slot_store
from tokenbus.worker.engine.host_cache.slot_store import SlotStore, kv_identity
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.memory.planner import MemoryPlanner, PlannedReplica
from tokenbus.worker.engine.scheduling.plan import Outcome, ScheduledTokens, StepPlan, Undone
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.files.layouts import GgufLayout, SafetensorsLayout
from tokenbus.worker.files.model_files import ModelFiles
from tokenbus.worker.models import registry

_LEAST_KV_TOKENS = 2_048
"""No smaller context is tried if planned memory is no longer free."""


def load(
    settings: EngineSettings,
    progress: Callable[[float], None],
    models: LoadedModels[GgufModel] | None = None,
    planner: MemoryPlanner | None = None,
    begin: Callable[[], None] = lambda: None,
) -> Runner:
    """Returns a runner over a model that replicas share. `progress` gets the fraction loaded, from 0 to 1. `begin` is
    called when the files are there.

    Raises ModelError if the file can't be served, or for settings that the model or the memory can't meet."""
    backend.init()
    settings_resolution.validate(settings)  # before a long download
    files = ModelFiles.from_paths(settings.files) or _find(settings, progress)
    models, planner = models or LoadedModels(), planner or MemoryPlanner()
    begin()
    model = models.acquire(model_key(files, settings), lambda: GgufModel(files, settings, progress, planner))
    try:
        resolved = settings_resolution.resolve(settings, model.generation_config)
        return _open_largest(model, resolved, planner, lambda: models.release(model))
    except BaseException:
        models.release(model)
        raise


def _open_largest(
    model: GgufModel, settings: EngineSettings, planner: MemoryPlanner, release: Callable[[], None]
) -> Runner:
    """Makes a context of the size that memory allows, or a smaller one if that memory is gone by then."""
    wanted = settings
    while True:
        planned = planner.plan_replica(model.memory, model.placement, wanted)
        try:
            return _open(model, settings.context_length, planned, planner, release)
        except BaseException as error:
            planner.claims.release(planned.part)
            fewer = planned.settings.kv_tokens // 2
            can_shrink = isinstance(error, context.ContextTooLargeError) and not settings.kv_tokens
            if not can_shrink or fewer < max(settings.context_length, _LEAST_KV_TOKENS):
                raise
            structlog.get_logger().warning("context_made_smaller", kv_tokens=fewer, reason=str(error))
            wanted = msgspec.structs.replace(settings, kv_tokens=fewer)


def _open(
    model: GgufModel,
    least_context: int,
    planned: PlannedReplica,
    planner: MemoryPlanner,
    release: Callable[[], None],
) -> Runner:
    def release_all() -> None:
        planner.claims.release(planned.part)
        release()

    runner: Runner
    if model.pooling is None:
        runner = GgufRunner(model, planned.settings, release_all, least_context=least_context)
    else:
        runner = pooler.make_runner(model, planned.settings, release_all)
    planner.claims.took(planned.part)
    runner.config = codec.replace(runner.config, memory=planned.memory)
    return runner


def _find(settings: EngineSettings, progress: Callable[[float], None]) -> ModelFiles:
    """Finds a model's GGUF, or makes it if the model is published as safetensors."""
    files = registry.find_as(
        settings.model, (GgufLayout(), SafetensorsLayout()), progress, follow_links=settings.follow_links
    )
    if converted.is_convertible(files):
        if settings.quantize:
            return converted.convert(settings.model, files, settings.quantize, settings.threads, progress)
        features = frozenset() if _uses_gpu(settings) else backend.processor_features()
        kind = weight_types.best_conversion(converted.published_type(files), features)
        return converted.convert_as_default(settings.model, files, kind, settings.threads, progress)
    if settings.quantize:
        raise ModelError(f"{files.weights}: is already a GGUF file; leave --quantize out, or pass its safetensors")
    return files


class GgufRunner(GeneratingRunner):
    """The context of one replica over a loaded model that generates. `release` is called once the model isn't needed.

    Raises ModelError for settings that the model can't meet, and if a sequence can't have `least_context` tokens."""

    def __init__(
        self, model: GgufModel, settings: EngineSettings, release: Callable[[], None], *, least_context: int = 0
    ) -> None:
        super().__init__(model)
        self._model = model
        self._release = release
        self._context: llama.llama_context_p | None = None
        self.adapters: ContextAdapters | None = None
        self.bundle = model.bundle
        self.copies: SlotStore | None = None
        self.embedder: CausalEmbedder | None = None
        try:
            self._open(settings, least_context)
        except BaseException:
            self._free()
            raise

    def __repr__(self) -> str:
        return f"<GgufRunner {self.config.source} {self._sampler!r} {self.lanes!r}>"

    def _open(self, settings: EngineSettings, least_context: int) -> None:
        """Creates the context and finds out what it can do."""
        metadata, handle = self._model.metadata, self._model.handle
        partial_state = self._model.has_partial_state
        self._context = context.create(handle, settings, partial_state=partial_state)
        self._batch = LlamaBatch(settings.max_num_batched_tokens, FIRST_SEQ_ID)
        self._max_rows = context.max_rows(settings)
        self.lanes = Lanes(self._context, has_partial_state=partial_state)
        capabilities = probe.capabilities(handle, self._context, self.lanes)
        self._can_batch = capabilities.can_batch
        self.canary: Listing[int] = capabilities.canary
        can_see = capabilities.can_share and not _uses_gpu(settings)
        self._visible_cells = capabilities.state_format if can_see else None
        """The format of saved keys and values, if they are in host memory and can be inspected."""
        self.adapters = self._model.adapters_of(self._context)
        self.row_tiles = self._tiles(settings, capabilities) if can_see else None
        self.num_lanes = context.num_lanes(settings, partial_state=partial_state)
        self._identity = _identity(metadata.fingerprint, settings, capabilities)
        self.copies = self.lanes.copies = self._make_store(settings, capabilities)
        self.config = self._describe(settings, capabilities)
        self.embedder = self._make_embedder(settings, capabilities)
        if self.embedder is not None:
            self.config = codec.replace(
                self.config, features=(*self.config.features, "embed"), embeddings=self.embedder.describe()
            )
        if least_context > self.config.context_length:
            raise ModelError(
                f"--context-length {least_context} is above what one sequence can have here, "
                f"{self.config.context_length}: pass more --kv-tokens"
            )

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        self.lanes.apply(kv_ops)

    def step(self, plan: StepPlan) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for batch in plan.batches() if self._can_batch else [[part] for part in plan.scheduled]:
            outcomes |= self._compute(batch)
            if poisoned := [part for part in batch if outcomes[part.lane] is Undone.POISONED]:
                outcomes |= self._take_back(poisoned)
        return [outcomes[part.lane] for part in plan.scheduled]

    def _compute(self, batch: Listing[ScheduledTokens]) -> dict[int, Outcome]:
        """Computes a batch and samples; returns the outcome for each lane."""
        outcomes: dict[int, Outcome] = {}
        begun: set[int] = set()
        for pieces, padding in to_passes(batch, self._max_rows, self.row_tiles):
            # What has failed is not continued: a part is done as a whole or not at all.
            left = [one for one in pieces if not isinstance(outcomes.get(one.part.lane), Undone)]
            if left:
                outcomes |= self._compute_pass(left, padding)
                begun |= {one.part.lane for one in left if outcomes[one.part.lane] is not Undone.NO_ROOM}
        for part in batch:
            if isinstance(outcomes[part.lane], Undone):
                self.prompt_scores.discard(part.sequence)
            if outcomes[part.lane] is Undone.NO_ROOM and part.lane in begun:
                is_cut = self.lanes.take_back(part.lane, part.start)
                outcomes[part.lane] = Undone.NO_ROOM if is_cut else Undone.LOST
        return outcomes

    def _compute_pass(self, pieces: Listing[Piece], padding: int) -> dict[int, Outcome]:
        """Computes pieces of parts together; returns the outcome for each lane, which is None for all but last pieces.

        Without any token to sample, a row of logits costs a pass over the whole output matrix. Instead, keys and values
        in host memory are checked, which takes less."""
        has_rows = self._visible_cells is None or any(one.samples or one.has_scores for one in pieces)
        if not self._decode(pieces, padding, has_rows=has_rows):
            return {one.part.lane: Undone.NO_ROOM for one in pieces}
        if not has_rows:
            return {one.part.lane: None if self._is_finite(one) else Undone.POISONED for one in pieces}
        rows = self._rows(sum(one.num_rows for one in pieces))
        if any(one.has_scores for one in pieces):
            rows = self._score(pieces, rows)
        return non_finite.sort_out([one.share for one in pieces], rows, self._sampler, self.logits)

    def _score(self, pieces: Listing[Piece], rows: Matrix) -> Matrix:
        """Takes the log probabilities of prompts from the rows of pieces; returns the last row of each piece. It is not
        finite if any row of the piece is not."""
        ends = np.cumsum([one.num_rows for one in pieces])
        last: Matrix = rows[ends - 1]
        for number, (piece, end) in enumerate(zip(pieces, ends.tolist(), strict=True)):
            if not piece.has_scores:
                continue
            own = rows[end - piece.num_rows : end]
            if any(non_finite.are_poisoned(own)):
                last[number] = np.nan
            else:
                self.prompt_scores.add(piece.part.sequence, piece.end - len(own), piece.end, row_scores.packer(own))
        return last

    def _decode(self, pieces: Listing[Piece], padding: int, *, has_rows: bool) -> bool:
        """Computes pieces of a batch; returns whether there was room in the KV memory."""
        assert self._context is not None
        assert self.adapters is not None
        self.adapters.activate(pieces[0].part.sequence.adapters)
        parts = [BatchPart(one.part.lane, one.start, one.token_ids, one.num_rows) for one in pieces]
        if padding:  # tokens that the batch has anyway, so that these are as finite
            parts.append(BatchPart(SCRATCH - FIRST_SEQ_ID, 0, [parts[0].token_ids[0]] * padding, 0))
        self._batch.fill(parts, "last" if has_rows else "none")
        status = context.decode(self._context, self._batch.struct)
        if padding:
            self.lanes.clear_scratch()
            if status == 1:  # without padding there may be room
                return self._decode(pieces, 0, has_rows=has_rows)
        if status not in (0, 1):  # 1: no slot in the KV memory; nothing has changed
            raise DeviceError(f"llama_decode returned {status}: {backend.last_error()}")
        return bool(status == 0)

    def _rows(self, count: int) -> Matrix:
        # llama.cpp packs the rows of tokens with logits, in batch order.
        return np.ctypeslib.as_array(llama.llama_get_logits(self._context), (count, self._tokenizer.size))

    def _is_finite(self, piece: Piece) -> bool:
        """Whether all keys and values of a piece are finite."""
        assert self._visible_cells is not None
        blob = self.lanes.save(piece.part.lane, piece.start, piece.end)
        return not self._visible_cells.problem(memoryview(blob).cast("B"), piece.start, piece.end - piece.start)

    def _take_back(self, poisoned: Listing[ScheduledTokens]) -> dict[int, Outcome]:
        """Removes and overwrites what shares have computed; returns the outcome for each lane."""
        taken_back = {part.lane: self.lanes.take_back(part.lane, part.start) for part in poisoned}
        self.lanes.wipe()
        return {lane: Undone.POISONED if is_cut else Undone.LOST for lane, is_cut in taken_back.items()}

    def close(self) -> None:
        self._free()
        self._release()

    def _make_embedder(self, settings: EngineSettings, capabilities: probe.Capabilities) -> CausalEmbedder | None:
        """Returns None if the model can't make embeddings, or shouldn't."""
        if settings.pooling == "none":
            return None
        if (reason := capabilities.missing.get("embeddings")) is not None:
            if settings.pooling == "auto":
                return None
            raise ModelError(f"--pooling {settings.pooling} can't be met: {reason}")
        made = CausalEmbedder(self._model, settings, self.config.context_length)
        if not capabilities.can_batch:
            made.batch_limits = made.batch_limits._replace(max_inputs=1)
        return made

    def _tiles(self, settings: EngineSettings, capabilities: probe.Capabilities) -> RowTiles | None:
        """Returns the tiles of llama.cpp's attention on CPUs; None if none are used."""
        layout, most = capabilities.state_format, min(settings.ubatch_tokens, settings.max_num_batched_tokens)
        if layout is None or not layout.has_flash_tiles or most < model_facts.TILE_ROWS:
            return None
        return model_facts.row_tiles(self._model.metadata, self._model.files.weights)

    def _free(self) -> None:
        if self.embedder is not None:
            self.embedder.close()
            self.embedder = None
        if self.adapters is not None:
            self.adapters.close()
            self.adapters = None
        if self._context is not None:
            llama.llama_free(self._context)
            self._context = None

    def _describe(self, settings: EngineSettings, capabilities: probe.Capabilities) -> contract.EngineConfig:
        assert self._context is not None
        block_size = settings.kv_block_size
        fits = llama.llama_n_ctx(self._context) // block_size * block_size
        missing = dict(capabilities.missing)
        sizes = None
        if capabilities.checkpoint is not None:
            sizes = slot_store.checkpoint_sizes(capabilities.checkpoint, self.copies)
        if capabilities.checkpoint is not None and sizes is None:
            left = slot_store.budget_bytes(settings)
            missing["prefix_cache"] = f"--host-cache-mib leaves {left} bytes, which are too few for a checkpoint"
        if self.bundle is None:
            missing["router_tokenizing"] = "no tokenizer made from its files agrees with llama.cpp's on all probes"
        exchanged = capabilities.state_format if self.copies is not None and capabilities.can_share else None
        offered = self._offered(missing, lora=True, caches=capabilities.can_share or sizes is not None)
        return codec.replace(
            self._model.describe(settings, min(settings.context_length, fits), offered),
            max_num_seqs=settings.max_num_seqs,
            kv_block_size=block_size,
            total_kv_blocks=llama.llama_n_ctx(self._context) // block_size,
            kv_tokens=int(llama.llama_n_ctx(self._context)),
            host_kv_blocks=self.copies.layout.num_slots if self.copies is not None and capabilities.can_share else 0,
            kv_identity="" if exchanged is None else self._identity,
            kv_format=None if exchanged is None else exchanged.block_format(block_size),
            # On a CPU copying costs a thousandth of computing; on a GPU it was not measured (decision 0020).
            writes_through=not _uses_gpu(settings) or bool(settings.keep_cache),
            prefix_cache=capabilities.can_share or sizes is not None,
            checkpoint_sizes=sizes,
            missing=missing,
            chat_format=self._model.chat_format,
            kv_bytes=self._kv_bytes(settings, capabilities),
        )

    def _make_store(self, settings: EngineSettings, capabilities: probe.Capabilities) -> SlotStore | None:
        """Returns a store for copies of blocks, or of checkpoints; None if there can't be any or should be none."""
        form, block_size = capabilities.state_format, settings.kv_block_size
        problem = state_blob.unknown if form is None else form.problem  # what can't be checked is not recovered
        if capabilities.checkpoint is not None:
            return slot_store.make_checkpoint_store(
                self._identity, capabilities.checkpoint, settings, problem, self.lanes.state_problem
            )
        if not capabilities.can_share or not capabilities.bytes_per_token:
            return None
        size = capabilities.bytes_per_token * max(block_size, probe.TOKENS) if form is None else form.size(block_size)
        return slot_store.make_store(self._identity, block_size, size, settings, problem)

    def _kv_bytes(self, settings: EngineSettings, capabilities: probe.Capabilities) -> int:
        """Returns the most device memory that all lanes can take."""
        num_tokens = int(llama.llama_n_ctx(self._context))
        if capabilities.checkpoint is None:
            return num_tokens * model_facts.bytes_per_token(self._model.metadata, settings)
        sizes = capabilities.checkpoint
        return num_tokens * sizes.token_bytes + int(llama.llama_n_seq_max(self._context)) * sizes.state_bytes


def _identity(fingerprint: str, settings: EngineSettings, capabilities: probe.Capabilities) -> str:
    """Returns the identity of a context's keys and values. `auto` settings may resolve differently on another machine,
    which a block's layout shows."""
    layout = capabilities.state_format
    form = f"flash-{settings.flash_attention}" if layout is None else layout.digest
    types = f"{settings.cache_type_k},{settings.cache_type_v},{form}"
    return kv_identity(fingerprint, types, f"llama.cpp {llama_cpp.__version__}", settings.kv_block_size)


def _uses_gpu(settings: EngineSettings) -> bool:
    wanted = bool(settings.gpu_layers) and settings.devices != (backend.NO_DEVICE,)
    return wanted and bool(llama.llama_supports_gpu_offload())
