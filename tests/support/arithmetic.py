"""A runner without a model: the next token is a number computed from all tokens before it.

It is exact and instant, and it fails when it is given anything but a sequence's tokens in order."""

import os
import threading
import time
import zlib
from array import array
from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.protocol.wire import codec, errors, internal, messages
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.contract.engine_errors import InsufficientMemoryError
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.runner import BatchLimits, Embedder, Reranker, RunnerAdapters, WholePass
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.host_cache.slots import SlotLayout
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate
from tokenbus.worker.engine.scheduling.plan import Outcome, SampledToken, StepPlan, Undone
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence
from tokenbus.worker.files.device_memory import DeviceMemory

END_TOKEN = 0
PIECES = [
    b"",
    *(bytes([byte]) for byte in range(0x20, 0x7F)),
    b" the",
    b" and ",
    b"\xc3",
    b"\xa9",
    b"\xe2\x82",
    b"\xac",
    b"\xf0\x9f\x98\x80",
    b"\xff",
]
"""One end token, the printable characters, two words, and parts of characters."""


def block_of(tokens: dict[int, int]) -> bytes:
    """A saved block: the position and the id of each token."""
    return array("i", [number for place in sorted(tokens) for number in (place, tokens[place])]).tobytes()


def exchanging(config: contract.EngineConfig, host_blocks: int = 64) -> contract.EngineConfig:
    """Returns the config of an engine that exchanges blocks."""
    size = config.kv_block_size
    block_format = contract.KvBlockFormat(num_bytes=8 * size, positions=tuple((at,) for at in range(0, 8 * size, 8)))
    return codec.replace(config, host_kv_blocks=host_blocks, kv_identity="arithmetic", kv_format=block_format)


def make_config(**changes: object) -> contract.EngineConfig:
    fields: dict[str, object] = {
        "engine": "arithmetic",
        "engine_version": "1",
        "source": "none",
        "fingerprint": "0" * 16,
        "context_length": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_block_size": 16,
        "total_kv_blocks": 64,
        "prefix_cache": True,
        "vocab_size": len(PIECES),
        "features": ("generate", "rerank", "cache_control"),
        "defaults": SamplingParams(),
        "versions": {},
        "pid": os.getpid(),
        "embeddings": messages.CardEmbeddings(dimensions=Sums.width, pooling="last", max_input_tokens=256),
    }
    return contract.EngineConfig(**(fields | changes))  # type: ignore[arg-type]


class Cell:
    """One token in the KV memory; lanes that share it hold the same object."""

    __slots__ = ("token_id",)

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id


class Sums:
    """An embedder and reranker that returns the sum, the length and the last token of each input."""

    width = 3
    vocab_size = len(PIECES)

    def __init__(self, config: contract.EngineConfig) -> None:
        self.max_input_tokens = config.context_length
        self.batch_limits = BatchLimits(config.max_num_batched_tokens, 8, is_padded=False)

    def tokenize(self, text: str) -> list[int]:
        return [1 + byte % (len(PIECES) - 1) for byte in text.encode()]

    def pair(self, query: str, documents: Listing[str]) -> list[list[int]]:
        return [self.tokenize(query + document) for document in documents]

    def describe(self) -> messages.CardEmbeddings:
        return messages.CardEmbeddings(dimensions=self.width, pooling="last", max_input_tokens=self.max_input_tokens)

    def begin(self, inputs: Listing[Listing[int]]) -> WholePass:
        return WholePass(self.pool, inputs)

    def pool(self, inputs: Listing[Listing[int]]) -> Matrix:
        return np.array([[sum(one), len(one), one[-1]] for one in inputs], np.float32)


class ArithmeticRunner:
    """A runner that computes sums instead of logits.

    Each step waits for `gate` and takes `step_s` seconds; `failures` are the results of steps that fail, by number."""

    def __init__(
        self,
        config: contract.EngineConfig | None = None,
        gate: threading.Event | None = None,
        failures: dict[int, Exception | EngineFinishReason] | None = None,
        step_s: float = 0.0,
        num_lanes: int = 24,
    ) -> None:
        self.config = config or make_config()
        self.end_token_ids = frozenset({END_TOKEN})
        self.token_bytes = PIECES
        self.bundle: bytes | None = None
        self.copies = _make_store(self.config) if self.config.host_kv_blocks else None
        self.embedder: Embedder | None = Sums(self.config)
        self.reranker: Reranker | None = Sums(self.config)
        self.adapters: RunnerAdapters | None = None
        self.reasoning_closer: ReasoningCloser | None = None
        self.num_lanes = num_lanes
        self.row_tiles = None
        self.logits = None
        self.prompt_scores = None
        self.canary: Listing[int] = ()
        self.num_steps = 0
        self.num_evaluated = 0
        """The number of tokens that were computed."""
        self.step_sizes: list[int] = []
        self.closed = False
        self._gate = gate
        self._failures = failures or {}
        self._step_s = step_s
        self._samplers: dict[int, engine_request.Sampling] = {}
        self._lanes: list[dict[int, Cell]] = [{} for _ in range(num_lanes)]

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        assert seq_no not in self._samplers, f"sequence {seq_no} has begun"
        self._samplers[seq_no] = sampling

    def remove_sequence(self, seq_no: int) -> None:
        self._samplers.pop(seq_no, None)

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        for op in kv_ops:
            match op:
                case Share(lane, to, start, end):
                    held = self._lanes[lane]
                    self._lanes[to] |= {place: held[place] for place in range(start, end)}
                case Truncate(lane, start, last):
                    held = self._lanes[lane]
                    self._lanes[lane] = {
                        place: cell for place, cell in held.items() if not start <= place < (last or 1 << 30)
                    }
                case Offload(number, lane, start, end):
                    held = self._lanes[lane]
                    copied = {place: held[place].token_id for place in range(start, end)}
                    self.opened_copies().write(number, block_of(copied))
                case Onload(number, lane, start, end):
                    numbers = array("i", bytes(self.opened_copies().read(number)))
                    copied = dict(zip(numbers[::2], numbers[1::2], strict=True))
                    self._lanes[lane] |= {place: Cell(copied[place]) for place in range(start, end)}
                case Discard(number):
                    self.opened_copies().discard(number)
        self.check_room()

    def saved(self, tokens: dict[int, int]) -> bytes:
        """Returns what the copy of a block has for its tokens."""
        return block_of(tokens)

    def opened_copies(self) -> SlotStore:
        """Returns the copies in host memory, in a file of their own if nobody has opened them."""
        assert self.copies is not None, "there is no host memory"
        if not self.copies.is_open:
            self.copies.open()
        return self.copies

    def is_empty(self) -> bool:
        return not any(self._lanes) and not self.copies

    def check_room(self) -> None:
        """Fails if the lanes hold more than there is room for."""
        cells = {id(cell) for lane in self._lanes for cell in lane.values()}
        assert len(cells) <= self.config.total_kv_blocks * self.config.kv_block_size, "more KV than there is"

    def step(self, plan: StepPlan) -> list[Outcome]:
        if self._gate is not None:
            self._gate.wait()
        time.sleep(self._step_s)
        self.num_steps += 1
        failure = self._failures.get(self.num_steps)
        if isinstance(failure, InsufficientMemoryError):
            return [Undone.NO_ROOM for _ in plan.scheduled]
        if isinstance(failure, Exception):
            raise failure
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        self.step_sizes.append(plan.num_tokens)
        self.num_evaluated += plan.num_tokens
        results: list[Outcome] = []
        for part in plan.scheduled:
            sampling = self._samplers.get(part.sequence.seq_no)
            lane = self._lanes[part.lane]
            assert len(lane) == part.start, "a gap or an overlap in what was computed"
            for place, token_id in enumerate(part.token_ids, start=part.start):
                lane[place] = Cell(token_id)
            computed = array("I", (lane[place].token_id for place in range(part.start + part.num_tokens)))
            assert computed == part.sequence.token_ids[: len(computed)], "tokens of another sequence"
            if not part.samples:
                results.append(None)
                continue
            assert sampling is not None, part
            results.append(failure or SampledToken(next_token(sampling, computed, part.sequence)))
        self.check_room()
        return results

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        if request.text is None:
            raise errors.request_error(errors.Code.UNSUPPORTED, "no chat template", param="messages")
        return Sums(self.config).tokenize(request.text)

    def encode(self, text: str) -> list[int]:
        return Sums(self.config).tokenize(text)

    def device_memory(self) -> list[DeviceMemory]:
        return []

    def close(self) -> None:
        self.closed = True


def _make_store(config: contract.EngineConfig) -> SlotStore:
    def find_problem(data: memoryview, start: int, count: int) -> str:
        if len(data) != 8 * count:
            return "size"
        return "" if list(array("i", bytes(data))[::2]) == list(range(start, start + count)) else "positions"

    layout = SlotLayout(config.kv_block_size, 8 * config.kv_block_size, config.host_kv_blocks)
    return SlotStore("arithmetic", layout, find_problem)


def next_token(sampling: engine_request.Sampling, computed: "array[int]", sequence: Sequence) -> int:
    """Returns the token that comes after `computed`."""
    draw = zlib.crc32(f"{sampling.seed} {sequence.num_sampled}".encode()) if sampling.temperature > 0 else 0
    token = (zlib.crc32(computed.tobytes()) + draw) % len(PIECES)
    forbidden = {END_TOKEN} if sampling.ignore_eos else set()
    if not sequence.may_stop:
        forbidden |= {END_TOKEN, *sampling.stop_token_ids}
    while token in forbidden:
        token = (token + 1) % len(PIECES)
    return token
