"""The protocol between a benchmark and a baseline in its own process: one line of JSON each way."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bench.streams import Timing


class Ask(msgspec.Struct, frozen=True):
    """A request: prompts of equal length, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    tokens: int


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


@contextlib.contextmanager
def running(module: str, model: Path, *sizes: int) -> Iterator[Callable[[Ask], Awaitable[Timing]]]:
    """Runs `python -m MODULE MODEL THREADS CONTEXT [UBATCH]`; yields a function that asks it."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(model), *map(str, sizes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    source, sink = process.stdout, process.stdin

    def call(ask: Ask) -> Timing:
        sink.write(msgspec.json.encode(ask).decode() + "\n")
        sink.flush()
        return msgspec.json.decode(source.readline(), type=Timing)

    try:
        assert source.readline() == "ready\n"
        yield lambda ask: asyncio.to_thread(call, ask)
    finally:
        process.kill()
        process.wait()
