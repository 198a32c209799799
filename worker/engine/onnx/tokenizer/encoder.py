"""Serves an encoder: embeddings and nothing else."""

import os
from collections.abc import Callable
from collections.abc import Sequence as Listing

import onnxruntime

from tokenbus.protocol.wire import internal
from tokenbus.worker import contract
from tokenbus.worker.engine.kv.moves import Move
from tokenbus.worker.engine.models import weights
from tokenbus.worker.engine.onnx.embedder import make_embedder
from tokenbus.worker.engine.onnx.graphs.session import Device
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import Embedder
from tokenbus.worker.engine.scheduling.plan import Sampled, StepPlan
from tokenbus.worker.engine.scheduling.sequence import End

_CHOSEN_LENGTH = 512


class EncoderRunner:
    """One replica of a loaded encoder. It has no lanes in which a sequence could run: the front refuses generations."""

    def __init__(self, model: OnnxModel, settings: EngineSettings, device: Device, release: Callable[[], None]) -> None:
        self._release = release
        self._vocabulary = model.vocabulary
        self.end_token_ids: frozenset[int] = frozenset()
        self.pieces = model.vocabulary.pieces
        self.bundle: bytes | None = model.vocabulary.bundle
        self.num_lanes = 1
        trained = model.facts.context_length or _CHOSEN_LENGTH
        longest = min(settings.context_length or trained, trained)
        self.embedder: Embedder | None = make_embedder(model, settings, longest=longest)
        assert self.embedder is not None
        self.config = contract.EngineConfig(
            engine="onnx",
            engine_version=f"onnxruntime {onnxruntime.__version__} on {device.kind}",
            source=weights.source_of(settings.model),
            fingerprint=settings.fingerprint or model.fingerprint,
            context_length=longest,
            max_num_seqs=1,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=longest,
            total_kv_blocks=1,
            prefix_cache=False,
            vocab_size=model.vocabulary.size,
            features=("embed",),
            defaults=model.advised.defaults,
            versions={"onnxruntime": onnxruntime.__version__},
            pid=os.getpid(),
            files=weights.to_files(model.found),
            embedding_width=self.embedder.width,
        )

    def __repr__(self) -> str:
        return f"<EncoderRunner {self.config.source}>"

    def begin(self, seq_no: int, sampling: contract.Sampling) -> None:
        raise AssertionError("an encoder generates nothing")

    def finish(self, seq_no: int) -> None:
        """Nothing was prepared."""

    def apply(self, moves: Listing[Move]) -> None:
        assert not moves, moves

    def step(self, plan: StepPlan) -> list[Sampled | End]:
        raise AssertionError("an encoder generates nothing")

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._vocabulary.tokenize(request)

    def close(self) -> None:
        self._release()
