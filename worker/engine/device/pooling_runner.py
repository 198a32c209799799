"""Serves a model that turns an input into one row of numbers, such as an embedding, and generates nothing."""

from collections.abc import Callable
from collections.abc import Sequence as Listing

from tokenbus.protocol.wire import internal
from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.engine.device.runner import Embedder, Reranker, RunnerAdapters
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.scheduling.plan import Outcome, StepPlan
from tokenbus.worker.files.device_memory import DeviceMemory
from tokenbus.worker.tokenizers.model_tokenizer import ModelTokenizer


class PoolingRunner:
    """One replica of such a model. The frontend refuses requests to generate, since it lacks the feature."""

    def __init__(
        self,
        config: contract.EngineConfig,
        tokenizer: ModelTokenizer,
        device_memory: Callable[[], list[DeviceMemory]],
        close: Callable[[], None],
        *,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self.token_bytes: list[bytes] = []
        self.bundle: bytes | None = None
        self.copies: SlotStore | None = None
        self.embedder = embedder
        self.reranker = reranker
        self.reasoning_closer: ReasoningCloser | None = None
        self.end_token_ids: frozenset[int] = frozenset()
        self.num_lanes = 1
        self.logits = None
        self.canary: Listing[int] = ()
        self.adapters: RunnerAdapters | None = None
        self._device_memory = device_memory
        self._close = close

    def __repr__(self) -> str:
        return f"<PoolingRunner {self.config.source} {self.embedder or self.reranker!r}>"

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        raise AssertionError("this model generates nothing")

    def remove_sequence(self, seq_no: int) -> None:
        """Does nothing: no sequence was ever added."""

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        assert not kv_ops, kv_ops

    def step(self, plan: StepPlan) -> list[Outcome]:
        raise AssertionError("this model generates nothing")

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._tokenizer.tokenize(request)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def device_memory(self) -> list[DeviceMemory]:
        return self._device_memory()

    def close(self) -> None:
        self._close()
