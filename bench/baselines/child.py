"""The protocol between a benchmark and a baseline in its own process: one line of JSON each way."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec


class Ask(msgspec.Struct, frozen=True):
    """A request: prompts of equal length, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    tokens: int


class Timing(msgspec.Struct, frozen=True):
    """The answer: times in seconds, and tokens."""

    prompt_s: float
    """Time until every prompt had its first token."""
    decode_s: float
    """Time from there on, while all rows decoded."""
    cpu_s: float
    """CPU time in that period."""
    decoded: int
    """Tokens of all rows in that period."""
    whole_s: float
    """Time until every prompt had its last token."""


class Clock:
    """Times a batch whose rows advance together, from the moment the clock is created."""

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
    """Runs the child's side until its input ends."""
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

    def call(self, line: str) -> str:
        """Sends a line and returns the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def generate(self, ask: Ask) -> Timing:
        return msgspec.json.decode(self.call(msgspec.json.encode(ask).decode()), type=Timing)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
