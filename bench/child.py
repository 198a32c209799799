"""A way of computing tokens that has a process of its own, and the line of JSON that is said to it and back."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec


class Ask(msgspec.Struct, frozen=True):
    """Prompts of equal length, and how many tokens to make of each."""

    prompts: list[list[int]]
    tokens: int


class Timing(msgspec.Struct, frozen=True):
    """What generating came to, in seconds and tokens."""

    prompt_s: float
    """Until every prompt had its first token."""
    decode_s: float
    """From there on, for as long as all were decoding."""
    cpu_s: float
    """CPU time of those."""
    decoded: int
    """Tokens of all together that came within them."""
    whole_s: float
    """Until every prompt had its last token."""


class Clock:
    """Runs from its making on; for a batch whose rows all go in step."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first = self._first_cpu = 0.0

    def prompts_are_done(self) -> None:
        self._first, self._first_cpu = time.perf_counter(), time.process_time()

    def took(self, ask: Ask) -> Timing:
        ended = time.perf_counter()
        return Timing(
            prompt_s=self._first - self._began,
            decode_s=ended - self._first,
            cpu_s=time.process_time() - self._first_cpu,
            decoded=len(ask.prompts) * (ask.tokens - 1),
            whole_s=ended - self._began,
        )


def serve(generate: Callable[[Sequence[Sequence[int]], int, Clock], None]) -> None:
    """The child's side: answers until its input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        ask = msgspec.json.decode(line, type=Ask)
        clock = Clock()
        generate(ask.prompts, ask.tokens, clock)
        print(msgspec.json.encode(clock.took(ask)).decode(), flush=True)


class Child:
    """The parent's side of `python -m MODULE MODEL THREADS CONTEXT`."""

    def __init__(self, module: str, model: Path, threads: int, context: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(model), str(threads), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def generate(self, ask: Ask) -> Timing:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(ask).decode() + "\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._read(), type=Timing)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
