"""A runner without a model: the next token is a number computed from all tokens before it. Exact, instant, and it
notices when it is fed anything but a sequence's tokens in order."""

import os
import random
import threading
import time
import zlib

from protocol import errors, internal
from worker import contract
from worker.engine.plan import StepPlan
from worker.engine.sequence import End

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
"""One end token, the printable characters, words, and the halves of characters."""


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
        "prefix_cache": False,
        "vocab_size": len(PIECES),
        "features": ("generate",),
        "defaults": contract.SamplingDefaults(),
        "versions": {},
        "pid": os.getpid(),
    }
    return contract.EngineConfig(**(fields | changes))  # type: ignore[arg-type]


class ArithmeticRunner:
    """`gate`, where given, holds every step back until it is open; `failures` says which step fails, and how; `step_s`
    is what a step takes, as it would on a device."""

    def __init__(
        self,
        config: contract.EngineConfig | None = None,
        gate: threading.Event | None = None,
        failures: dict[int, Exception | End] | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.config = config or make_config()
        self.end_token_ids = frozenset({END_TOKEN})
        self.pieces = PIECES
        self.bundle: bytes | None = None
        self.num_steps = 0
        self.step_sizes: list[int] = []
        self.closed = False
        self._gate = gate
        self._failures = failures or {}
        self._step_s = step_s
        self._lanes: dict[int, tuple[contract.Sampling, list[int], random.Random]] = {}

    def begin(self, lane: int, sampling: contract.Sampling) -> None:
        assert lane not in self._lanes, f"lane {lane} is in use"
        assert len(self._lanes) < self.config.max_num_seqs
        self._lanes[lane] = (sampling, [], random.Random(sampling.seed))

    def release(self, lane: int) -> None:
        del self._lanes[lane]

    def step(self, plan: StepPlan) -> list[int | End]:
        if self._gate is not None:
            self._gate.wait()
        time.sleep(self._step_s)
        self.num_steps += 1
        failure = self._failures.get(self.num_steps)
        if isinstance(failure, Exception):
            raise failure
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        self.step_sizes.append(plan.num_tokens)
        results: list[int | End] = []
        for part in plan.parts:
            sampling, computed, rng = self._lanes[part.lane]
            assert part.start == len(computed), "a gap or an overlap in what was computed"
            computed.extend(part.token_ids)
            assert computed == part.sequence.token_ids[: len(computed)]
            if part.samples:
                results.append(failure or self._next(sampling, computed, rng, may_stop=part.sequence.may_stop))
        held = sum(-(-len(computed) // self.config.kv_block_size) for _, computed, _ in self._lanes.values())
        assert held <= self.config.total_kv_blocks, "more KV than there is"
        return results

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        if request.text is None:
            raise errors.request_error(errors.Code.UNSUPPORTED, "no chat template", param="messages")
        return [1 + byte % (len(PIECES) - 1) for byte in request.text.encode()]

    def close(self) -> None:
        self.closed = True

    def _next(self, sampling: contract.Sampling, computed: list[int], rng: random.Random, *, may_stop: bool) -> int:
        draw = rng.getrandbits(30) if sampling.temperature > 0 else 0
        token = (zlib.crc32(repr(computed).encode()) + draw) % len(PIECES)
        forbidden = {END_TOKEN} if sampling.ignore_eos else set()
        if not may_stop:
            forbidden |= {END_TOKEN, *sampling.stop_token_ids}
        while token in forbidden:
            token = (token + 1) % len(PIECES)
        return token
