"""Executes step plans by waiting as long as a device would take, and injects faults. The generated text says that it is
simulated."""

import itertools
import math
import os
import struct
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import NamedTuple

import msgspec
import xxhash

from tokenbus.protocol.bus.bus import Bus, Outgoing
from tokenbus.protocol.wire import errors, internal
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract import contract, engine_output, engine_request, prompt_logprobs
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.prompt_scores import PromptScores
from tokenbus.worker.engine.device.runner import Embedder, Reranker, RunnerAdapters
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.host_cache.slots import SlotLayout
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload
from tokenbus.worker.engine.scheduling.plan import Outcome, SampledToken, ScheduledTokens, StepPlan, Undone
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.files.device_memory import DeviceMemory

_FAULT_KINDS = ("crash", "hang", "slow", "lose", "poison", "stain", "load")
VOCAB_SIZE = 1_024
"""Small, because a process may have hundreds of replicas, each with its own list."""
_END = 0
_FIRST_WORD = 257
"""Id 0 ends a text, ids 1 to 256 are the bytes of prompts, and the others are the generated words."""
_NUM_WORDS = VOCAB_SIZE - _FIRST_WORD
_FEATURES = (
    "generate",
    "chat",
    "stop",
    "seed",
    "return_token_ids",
    "logprobs",
    "prompt_logprobs",
    "progress",
    "cache_control",
)
_LOG_2 = math.log(2)
_DEFAULT_CONTEXT = 131_072
_DEFAULT_KV_TOKENS = 131_072
_DEFAULT_NUM_SEQS = 64
_DEFAULT_BLOCK_SIZE = 16
_TOKEN_BYTES = 64
"""The size of a token in a copy."""
_MAX_HOST_BLOCKS = 65_536
_MAX_LOAD_MS = 3_600_000
_LOAD_TICK_S = 0.1
"""The progress of a load is reported this often."""


class Faults(msgspec.Struct, frozen=True):
    """The faults of one replica, which a simulator injects. Counts are sampled tokens; 0 means never, or no token."""

    crash: int = 0
    """The engine process dies after this many tokens."""
    hang: int = 0
    """The step after this many tokens never ends."""
    slow: int = 0
    """The step after this many tokens takes `slow_ms` longer."""
    slow_ms: float = 0.0
    lose: int = 0
    """Every n-th entry of the event log is lost in transit."""
    poison: int = 0
    """The id of a token after which its sequence's numbers are not finite."""
    stain: int = 0
    """The id of a token after which no sequence's numbers are finite any more."""
    load: int = 0
    """The milliseconds that loading the model takes."""


def parse_faults(text: str) -> Faults:
    """Parses a script such as `crash@200,slow@50=3000,hang@900,lose@20`. Raises ValueError."""
    found = Faults()
    for one in filter(None, text.split(",")):
        kind, _, when = one.partition("@")
        count, _, length = when.partition("=")
        if kind not in _FAULT_KINDS or not count.isdecimal() or not int(count) or bool(length) != (kind == "slow"):
            raise ValueError(
                f"{one!r} is no fault: use crash@TOKENS, hang@TOKENS, slow@TOKENS=MS, lose@EVENTS, poison@TOKEN_ID, "
                "stain@TOKEN_ID or load@MS"
            )
        found = msgspec.structs.replace(found, **{kind: int(count)})
        if found.load > _MAX_LOAD_MS:
            raise ValueError(f"a model takes at most {_MAX_LOAD_MS:,} ms to load, got {found.load:,}")
        if kind == "slow":
            found = msgspec.structs.replace(found, slow_ms=_milliseconds(length))
    return found


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 3_600_000:
        raise ValueError(f"a slow step takes more than 0 and at most 3,600,000 ms, got {text!r}")
    return value


def lose_events(bus: Bus, events_subject: str, settings: EngineSettings) -> None:
    """Makes `bus` lose every n-th message to `events_subject`, if the settings are for a simulator and ask for it. A
    malformed script does nothing here: the engine refuses it."""
    try:
        every = parse_faults(settings.sim_faults).lose if settings.engine == "sim" else 0
    except ValueError:
        return
    if not every:
        return
    publish_all, count = bus.publish_all, itertools.count(1)

    def lossy(messages: Listing[Outgoing]) -> None:
        publish_all([one for one in messages if one.subject != events_subject or next(count) % every])

    bus.publish_all = lossy  # type: ignore[method-assign]


class Polynomial(NamedTuple):
    """`squared * x * x + linear * x + constant`, in milliseconds."""

    squared: float
    linear: float
    constant: float

    def __call__(self, x: float) -> float:
        return (self.squared * x + self.linear) * x + self.constant


class TimingModel(NamedTuple):
    """A step takes the time of its prompt tokens, if any, plus that of its decodes, if any."""

    prefill: Polynomial
    """A function of the prompt tokens in the step."""
    decode: Polynomial
    """A function of the share of the KV memory that the sequences in the step use, from 0 to 1."""
    per_decode_ms: float = 0.0
    """The time that each decode adds."""
    least_ms: float = 0.0
    """The minimum time of a step."""

    def step_ms(self, prompt_tokens: int, decodes: int, kv_usage: float) -> float:
        prefill_ms = self.prefill(prompt_tokens) if prompt_tokens else 0.0
        decode_ms = self.decode(kv_usage) + self.per_decode_ms * decodes if decodes else 0.0
        return max(self.least_ms, prefill_ms + decode_ms)


PRESETS = {
    "dynamo": TimingModel(
        prefill=Polynomial(4.209989e-07, 1.518344e-02, 1.650142e01),
        decode=Polynomial(-25.74, 54.01, 5.74),
    ),
    "cpu-0.5b-q8_0": TimingModel(
        prefill=Polynomial(0.0, 8.3, 0.0),
        decode=Polynomial(0.0, 20.0, 16.0),
        per_decode_ms=14.5,
    ),
    "steps-of-50ms": TimingModel(Polynomial(0.0, 0.0, 0.0), Polynomial(0.0, 0.0, 0.0), least_ms=50.0),
}
"""`dynamo` has the polynomials of NVIDIA Dynamo's simulated engine. `cpu-0.5b-q8_0` is a model of 0.5B parameters in
Q8_0 on 2 threads of an x86-64 server, as measured in bench/README.md. `steps-of-50ms` depends on nothing."""


def load(settings: EngineSettings, progress: Callable[[float], None]) -> "SimRunner":
    """Takes as long as the settings' faults say to load a model, and reports the fraction. Raises ModelError."""
    runner = SimRunner(settings)
    load_s = runner.load_s
    until = time.monotonic() + load_s
    while (remaining_s := until - time.monotonic()) > 0:
        progress(1 - remaining_s / load_s)
        time.sleep(min(_LOAD_TICK_S, remaining_s))
    return runner


def plan_ms(plan: StepPlan, timing: TimingModel, capacity_tokens: int) -> float:
    """Returns the milliseconds that a step takes on a device with `capacity_tokens` of KV memory."""
    prompt_tokens = decodes = used = 0
    for part in plan.scheduled:
        used += part.start + part.num_tokens
        if part.num_tokens > 1 or not part.samples:
            prompt_tokens += part.num_tokens
        else:
            decodes += 1
    return timing.step_ms(prompt_tokens, decodes, min(1.0, used / capacity_tokens))


class SimRunner:
    """A device that computes nothing. `settings.model` names its timing model.

    Raises ModelError for settings that can't be met."""

    def __init__(self, settings: EngineSettings) -> None:
        preset = settings.model.removeprefix("sim:")
        if preset not in PRESETS:
            raise ModelError(f"--model {preset}: the simulator has the timings {', '.join(PRESETS)}")
        if settings.sim_speedup <= 0:
            raise ModelError(f"--sim-speedup must be above 0, got {settings.sim_speedup}")
        try:
            self._faults = parse_faults(settings.sim_faults)
        except ValueError as error:
            raise ModelError(f"--sim-faults: {error}") from error
        self._timing = PRESETS[preset]
        self._speedup = settings.sim_speedup
        self._sampled_tokens = 0
        self._samplings: dict[int, engine_request.Sampling] = {}
        self.end_token_ids = frozenset({_END})
        self.token_bytes = [b"", *(bytes([byte]) for byte in range(256))]
        self.token_bytes += [b" simulated-%d" % number for number in range(_NUM_WORDS)]
        self.bundle: bytes | None = None
        self.embedder: Embedder | None = None
        self.reranker: Reranker | None = None
        self.reasoning_closer: ReasoningCloser | None = None
        self.adapters: RunnerAdapters | None = None
        self.logits = None
        self.prompt_scores = PromptScores(VOCAB_SIZE)
        self.canary: Listing[int] = (1,)
        self._is_stained = False
        self.config = _config(preset, settings)
        self.copies = _make_store(self.config)
        self.num_lanes = self.config.max_num_seqs + self.config.total_kv_blocks
        self.row_tiles: RowTiles | None = None

    @property
    def load_s(self) -> float:
        """The seconds that its model takes to load."""
        return self._faults.load / 1e3

    def __repr__(self) -> str:
        return f"<SimRunner {self.config.source}, {len(self._samplings)} sequences>"

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        self._samplings[seq_no] = sampling

    def remove_sequence(self, seq_no: int) -> None:
        self._samplings.pop(seq_no, None)

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        """Keeps copies, which record only token positions: lanes have no content."""
        for op in kv_ops:
            match op:
                case Offload(number, _, start, end):
                    assert self.copies is not None
                    self.copies.write(number, struct.pack("<I", start) + bytes(_TOKEN_BYTES * (end - start)))
                case Discard(number):
                    assert self.copies is not None
                    self.copies.discard(number)

    def step(self, plan: StepPlan) -> list[Outcome]:
        capacity = self.config.total_kv_blocks * self.config.kv_block_size
        time.sleep(plan_ms(plan, self._timing, capacity) / 1e3 / self._speedup)
        outcomes = [self._outcome(part) for part in plan.scheduled]
        num_sampled = sum(isinstance(one, SampledToken) for one in outcomes)
        self._inject_faults(self._sampled_tokens, self._sampled_tokens + num_sampled)
        self._sampled_tokens += num_sampled
        return outcomes

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        """Returns a token for each byte."""
        if request.messages is not None:
            text = "".join(f"{message.role}: {validation.message_text(message)}\n" for message in request.messages)
        elif request.text is not None:
            text = request.text
        else:
            raise errors.request_error(errors.Code.INVALID_REQUEST, "there is nothing to tokenize", param="prompt")
        token_ids = self.encode(text)
        if request.max_tokens is not None and len(token_ids) > request.max_tokens:
            problem = (
                f"the prompt has {len(token_ids)} tokens; with one to generate it must fit {request.max_tokens + 1}"
            )
            raise errors.request_error(errors.Code.PROMPT_TOO_LONG, problem)
        return token_ids

    def encode(self, text: str) -> list[int]:
        """Returns a token for each byte."""
        return [1 + byte for byte in text.encode()]

    def device_memory(self) -> list[DeviceMemory]:
        return []

    def close(self) -> None:
        """Does nothing: there is no memory to free."""

    def _inject_faults(self, before: int, now: int) -> None:
        """Injects the faults that are due when the count of sampled tokens goes from `before` to `now`."""
        script = self._faults
        if before < script.slow <= now:
            time.sleep(script.slow_ms / 1e3)
        if before < script.hang <= now:
            threading.Event().wait()  # forever: the frontend has to notice
        if before < script.crash <= now:
            os.abort()

    def _outcome(self, part: ScheduledTokens) -> Outcome:
        stain, poison = self._faults.stain, self._faults.poison
        self._is_stained |= bool(stain) and stain in part.token_ids
        if self._is_stained or (poison and poison in part.token_ids):
            return Undone.POISONED
        if part.first_row is not None:
            token_ids, first = part.sequence.token_ids, part.first_row
            self.prompt_scores.add(
                part.sequence,
                first,
                part.end,
                lambda row, scored, count: b"".join(
                    prompt_logprobs.pack(one, *_probabilities(token_ids[: first + row + place], one, count))
                    for place, one in enumerate(scored, start=1)
                ),
            )
        return self._sample(part) if part.samples else None

    def _sample(self, part: ScheduledTokens) -> SampledToken:
        """Returns a word that follows from the seed, the last token and its position.

        A token at which the sequence would stop is skipped while it must not stop yet."""
        sequence, sampling = part.sequence, self._samplings[part.sequence.seq_no]
        seed = sampling.seed if sampling.temperature > 0 else 0  # greedy answers are the same for every seed
        token_id = _word_after(sequence.token_ids, seed)
        while not sequence.may_stop and token_id in sampling.stop_token_ids:
            token_id = _FIRST_WORD + (token_id - _FIRST_WORD + 1) % _NUM_WORDS
        if sampling.logprobs is None:
            return SampledToken(token_id, None)
        logprob, _, top = _probabilities(sequence.token_ids, token_id, sampling.logprobs)
        return SampledToken(token_id, engine_output.Logprob(token_id, logprob, top))


def _word_after(token_ids: Listing[int], seed: int) -> int:
    word = xxhash.xxh3_64_intdigest(f"{seed} {token_ids[-1]} {len(token_ids)}".encode())
    return _FIRST_WORD + word % _NUM_WORDS


def _probabilities(token_ids: Listing[int], token_id: int, count: int) -> tuple[float, int, list[tuple[int, float]]]:
    """Returns the log probability and the rank of the next token, and the likeliest `count` tokens. The word that is
    taken without a temperature has a probability of a half, the token with the next id one of a quarter, and so on."""
    likeliest = _word_after(token_ids, 0)
    rank = (token_id - likeliest) % VOCAB_SIZE + 1
    top = [((likeliest + place) % VOCAB_SIZE, -(place + 1) * _LOG_2) for place in range(min(count, VOCAB_SIZE))]
    return -rank * _LOG_2, rank, top


def _config(preset: str, settings: EngineSettings) -> contract.EngineConfig:
    block_size = settings.kv_block_size if settings.kv_block_size > 0 else _DEFAULT_BLOCK_SIZE
    context = settings.context_length or _DEFAULT_CONTEXT
    kv_tokens = settings.kv_tokens or max(context, _DEFAULT_KV_TOKENS)
    num_seqs = settings.max_num_seqs if settings.max_num_seqs > 0 else _DEFAULT_NUM_SEQS
    host_blocks = min(_MAX_HOST_BLOCKS, max(0, settings.host_cache_mib << 20) // (_TOKEN_BYTES * block_size))
    if kv_tokens < block_size:
        raise ModelError(f"--kv-tokens must be at least a block ({block_size}), got {kv_tokens}")
    if settings.max_num_batched_tokens <= num_seqs:
        raise ModelError(f"--max-num-batched-tokens must be above --max-num-seqs ({num_seqs})")
    return contract.EngineConfig(
        engine="sim",
        engine_version="1",
        source=f"sim:{preset}",
        fingerprint=f"sim-{preset}",
        context_length=min(context, kv_tokens // block_size * block_size),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_block_size=block_size,
        total_kv_blocks=kv_tokens // block_size,
        kv_tokens=kv_tokens,
        host_kv_blocks=host_blocks,
        prefix_cache=True,
        vocab_size=VOCAB_SIZE,
        features=_FEATURES,
        defaults=SamplingParams(),
        versions={},
        pid=os.getpid(),
        kv_identity=f"sim-{preset}:{block_size}" if host_blocks else "",
        kv_format=contract.KvBlockFormat(num_bytes=4 + _TOKEN_BYTES * block_size) if host_blocks else None,
    )


def _make_store(config: contract.EngineConfig) -> SlotStore | None:
    """Returns a store for copies of blocks, or None if the engine has none."""
    if config.kv_format is None:
        return None
    layout = SlotLayout(config.kv_block_size, config.kv_format.num_bytes, config.host_kv_blocks)
    return SlotStore(config.kv_identity, layout, _find_problem)


def _find_problem(data: memoryview, start: int, count: int) -> str:
    if len(data) != 4 + _TOKEN_BYTES * count:
        return "size"
    return "" if struct.unpack_from("<I", data) == (start,) else "positions"
