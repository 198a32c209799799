"""Executes step plans with onnxruntime: one run for all that decode, and one for each share of a prompt."""

import os
from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np
import onnxruntime
import structlog

from tokenbus.protocol.wire import internal
from tokenbus.worker import contract
from tokenbus.worker.engine.kv.moves import Cut, Move
from tokenbus.worker.engine.models import features, weights
from tokenbus.worker.engine.onnx import choices, probe
from tokenbus.worker.engine.onnx.arrays import Array
from tokenbus.worker.engine.onnx.cache.caches import Cache, Decoded
from tokenbus.worker.engine.onnx.cache.grouped import GroupedCache
from tokenbus.worker.engine.onnx.cache.lanes import Lanes, Shrink
from tokenbus.worker.engine.onnx.cache.plain import PlainCache
from tokenbus.worker.engine.onnx.embedder import make_embedder
from tokenbus.worker.engine.onnx.graphs import device
from tokenbus.worker.engine.onnx.graphs.session import Device
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import DeviceError, Embedder, ModelError, NoRoomError
from tokenbus.worker.engine.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import Part, Sampled, StepPlan
from tokenbus.worker.engine.scheduling.sequence import End


class OnnxRunner:
    """The cache of one replica over a loaded model that generates; `release` gives the model back.

    Raises ModelError for settings that the model or the machine can't meet, and for a graph that has no batches."""

    def __init__(self, model: OnnxModel, settings: EngineSettings, dev: Device, release: Callable[[], None]) -> None:
        self._model = model
        self._device = dev
        self._release = release
        self._vocabulary = model.vocabulary
        self.end_token_ids = self._vocabulary.end_token_ids | model.advised.end_token_ids
        self.pieces = self._vocabulary.pieces
        self.bundle: bytes | None = self._vocabulary.bundle
        self._min_free_bytes = settings.onnx.min_free_mib << 20
        limits = choices.Limits(_trained(model), self._bytes_per_token(), device.free_bytes(dev))
        shape = choices.shape(settings, model.advised, limits)
        self.num_lanes = shape.num_rows
        self._sampler = Sampler(self.end_token_ids, self._vocabulary.size)
        self._lanes = Lanes(shape.num_rows)
        self._cache = self._make_cache(settings, shape)
        self.embedder = self._make_embedder(settings, shape)
        self.config = self._describe(settings, shape)

    def __repr__(self) -> str:
        return f"<OnnxRunner {self.config.source} {self._cache!r}>"

    def begin(self, seq_no: int, sampling: contract.Sampling) -> None:
        self._sampler.begin(seq_no, sampling)

    def finish(self, seq_no: int) -> None:
        self._sampler.finish(seq_no)

    def apply(self, moves: Listing[Move]) -> None:
        try:
            self._cache.apply(self._lanes.resolve(moves))
        except NoRoomError as error:  # lanes are halfway, and nobody could say where
            raise DeviceError(str(error)) from error

    def step(self, plan: StepPlan) -> list[Sampled | End]:
        try:
            computed = self._compute(plan)
        except NoRoomError:
            self._undo(plan)
            raise
        parts = [part for decoded in computed for part in decoded.parts]
        if not parts:
            return []
        matrices = [decoded.logits for decoded in computed]
        logits = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        chosen = self._sampler.choose(logits, [part.sequence for part in parts])
        by_lane = dict(zip([part.lane for part in parts], chosen, strict=True))
        return [by_lane[part.lane] for part in plan.parts if part.samples]

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._vocabulary.tokenize(request)

    def close(self) -> None:
        self._release()

    def _compute(self, plan: StepPlan) -> list[Decoded]:
        """The logits behind each part that samples, as they come."""
        decodes = [part for part in plan.parts if _can_share_a_run(part)]
        prompts = [part for part in plan.parts if not _can_share_a_run(part)]
        if prompts:
            self._check_memory()
        found: list[Decoded] = []
        if decodes:
            found.append(self._cache.decode(decodes))
            self._note(decodes)
        for part in prompts:
            logits = self._prompt(part)
            self._note([part])
            if part.samples:
                found.append(Decoded([part], logits))
        return found

    def _undo(self, plan: StepPlan) -> None:
        """Has lanes give up what a step computed before it found no room: it will be computed again."""
        self._lanes.resolve([Cut(part.lane, part.start) for part in plan.parts])
        self._cache.apply([Shrink(part.lane, part.start) for part in plan.parts])  # the cache may be ahead of the lanes

    def _prompt(self, part: Part) -> Array:
        """In pieces, where the graph computes the logits of every token."""
        most, end = self._model.caller.most_tokens, part.start + part.num_tokens
        for start in range(part.start, end, most):
            piece = Part(part.sequence, start, min(most, end - start))
            logits = self._cache.prompt(piece, wants_logits=piece.samples)
        return logits

    def _note(self, parts: list[Part]) -> None:
        for part in parts:
            self._lanes.grow(part.lane, part.start, part.start + part.num_tokens)

    def _check_memory(self) -> None:
        """Raises NoRoomError where a prompt could take what the streams that run need."""
        free = device.free_bytes(self._device) if self._min_free_bytes else None
        if free is not None and free < self._min_free_bytes:
            structlog.get_logger().error("memory_low", free_bytes=free, min_free_bytes=self._min_free_bytes)
            raise NoRoomError(f"{free} bytes are free, --min-free-mib wants {self._min_free_bytes}")

    def _make_embedder(self, settings: EngineSettings, shape: choices.Shape) -> Embedder | None:
        """None where the graph shows no states, or can't compute a whole text at once: it generates all the same."""
        if self._model.graph.hidden is None:
            return None
        try:
            return make_embedder(self._model, settings, longest=shape.context_length)
        except ModelError as error:
            structlog.get_logger().info("no_embeddings", reason=str(error))
            return None

    def _make_cache(self, settings: EngineSettings, shape: choices.Shape) -> Cache:
        """Raises ModelError where there is no memory for it, or where batches compute something else."""
        model, where = self._model, str(self._model.found.weights)
        if model.graph.grouped:
            made: Cache = self._make_grouped(self._lanes, shape.context_length)
            lanes = Lanes(probe.LANES)
            if probe.agrees(self._make_grouped(lanes, probe.TOKENS), lanes, self._vocabulary.size, where):
                return made
        else:
            paddings = choices.max_paddings(settings, model.advised)
            for can_gap in (True, False) if model.graph.positions is not None else (False,):
                tried = PlainCache(model.caller, probe.PADDINGS, can_gap=can_gap)
                if probe.agrees(tried, Lanes(probe.LANES), self._vocabulary.size, where):
                    return PlainCache(model.caller, paddings, can_gap=can_gap)
        raise ModelError(
            f"{where}: computes something else in a batch than alone, so that requests would disturb each other; "
            "take another of its files (those of int8 scale a batch as a whole), export it anew, with a dynamic batch "
            "axis and attention_mask, or take its GGUF"
        )

    def _make_grouped(self, lanes: Lanes, context_length: int) -> GroupedCache:
        num_rows = len(lanes.lengths) + 1
        try:
            memory = device.make_rows(self._model.graph.kv, num_rows, context_length, self._device)
        except Exception as error:  # a GPU without room makes onnxruntime raise a class of its own
            size = num_rows * context_length * self._bytes_per_token()
            raise ModelError(
                f"there is no memory for a cache of {size} bytes: pass a smaller --context-length or --max-num-seqs"
            ) from error
        return GroupedCache(self._model.caller, memory, lanes)

    def _bytes_per_token(self) -> int:
        """Plain attention needs the cache twice: a run reads the one and writes the other."""
        graph = self._model.graph
        return graph.bytes_per_token * (1 if graph.grouped else 2)

    def _describe(self, settings: EngineSettings, shape: choices.Shape) -> contract.EngineConfig:
        model = self._model
        offered = features.of_sampler(chat=self._vocabulary.can_chat)
        if self.embedder is not None:
            offered += ("embed",)
        return contract.EngineConfig(
            engine="onnx",
            engine_version=f"onnxruntime {onnxruntime.__version__} on {self._device.kind}",
            source=weights.source_of(settings.model),
            fingerprint=settings.fingerprint or model.fingerprint,
            context_length=shape.context_length,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=shape.block_size,
            total_kv_blocks=shape.total_blocks,
            prefix_cache=True,
            vocab_size=self._vocabulary.size,
            features=offered,
            defaults=model.advised.defaults,
            versions={"onnxruntime": onnxruntime.__version__},
            pid=os.getpid(),
            files=weights.to_files(model.found),
            kv_bytes=shape.num_rows * shape.context_length * self._bytes_per_token(),
            embedding_width=self.embedder.width if self.embedder is not None else 0,
        )


def _can_share_a_run(part: Part) -> bool:
    """Whether it is one token behind others."""
    return part.num_tokens == 1 and part.start > 0 and part.samples


def _trained(model: OnnxModel) -> int | None:
    """Tokens of one sequence; a plain graph takes columns for places, so that none may be as far off as its window."""
    trained, window = model.facts.context_length, model.facts.window
    if model.graph.grouped or window is None:
        return trained
    return window if trained is None else min(trained, window)
