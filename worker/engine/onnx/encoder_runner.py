"""Serves an encoder, which computes embeddings and nothing else."""

from collections.abc import Callable
from collections.abc import Sequence as Listing

from tokenbus.protocol.wire import internal
from tokenbus.worker import contract
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.onnx.embedder import OnnxEmbedder
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.onnx.settings_resolution import CacheSize
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import Embedder
from tokenbus.worker.engine.scheduling.plan import SampledToken, StepPlan
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason

_DEFAULT_LENGTH = 512


class EncoderRunner:
    """One replica of a loaded encoder. It generates nothing: the frontend refuses such requests by its features."""

    def __init__(self, model: OnnxModel, settings: EngineSettings, release: Callable[[], None]) -> None:
        self._release = release
        self._tokenizer = model.tokenizer
        self.end_token_ids: frozenset[int] = frozenset()
        self.token_bytes = model.tokenizer.token_bytes
        self.bundle: bytes | None = model.tokenizer.bundle
        self.num_lanes = 1
        trained = model.model_config.context_length or _DEFAULT_LENGTH
        longest = min(settings.context_length or trained, trained)
        self.embedder: Embedder | None = OnnxEmbedder(model, settings, max_input_tokens=longest)
        size = CacheSize(block_size=longest, context_length=longest, max_num_seqs=1, num_rows=1)
        self.config = model.describe(settings, size, (), self.embedder)

    def __repr__(self) -> str:
        return f"<EncoderRunner {self.config.source}>"

    def add_sequence(self, seq_no: int, sampling: contract.Sampling) -> None:
        raise AssertionError("an encoder generates nothing")

    def remove_sequence(self, seq_no: int) -> None:
        """Does nothing: no sequence was ever added."""

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        assert not kv_ops, kv_ops

    def step(self, plan: StepPlan) -> list[SampledToken | EngineFinishReason]:
        raise AssertionError("an encoder generates nothing")

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._tokenizer.tokenize(request)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def close(self) -> None:
        self._release()
