"""Compares the ONNX engine with a loop on onnxruntime, with onnxruntime-genai, and with our GGUF engine.

    python -m bench.serving.onnx_decode QUESTION [--model FOLDER] [--threads 1] [--tokens 64] [--pairs 9]

`eight`: eight streams, compared with one request at a time in a loop written directly on onnxruntime.
`genai`: eight streams, compared with a batch of eight in onnxruntime-genai (needs that package).
`one`: one stream, compared with that loop.
`gguf`: one and eight streams, compared with the same system and the same weights in a GGUF file.

Our side is a broker, a router, a worker and a client, with none of the prompts cached. Both sides get the same prompts,
generate the same number of tokens with as many threads, and take turns. Decoding is timed while all streams decode.
Both sides are restarted several times, because one process may be up to a tenth slower than another of the same program
for its whole life, depending on the memory pages its weights got. Without --model, a 0.5B model in F32 with
GroupQueryAttention and random weights is made."""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench import flags, streams, system
from bench.baselines.child import Ask, Child, Timing
from bench.models import benchmark_model
from bench.paired import quartiles
from tokenbus.client import Client

CONTEXT = 1_024
_ROWS = 8
_ALTERNATIVES = {
    "eight": ("bench.baselines.bare_onnx", "onnxruntime, one request at a time", True),
    "genai": ("bench.baselines.bare_genai", "onnxruntime-genai, a batch", False),
    "one": ("bench.baselines.bare_onnx", "onnxruntime alone", False),
}
"""Module, name, and whether it gets one request at a time."""
_AIMS = {"eight": {8: "   aim 2"}, "genai": {8: "   aim 1"}, "one": {1: "   aim 0.95"}, "gguf": {1: "", 8: ""}}
"""The numbers of streams to measure, and the target ratio for each."""
Way = Callable[[Ask], Awaitable[Timing]]


class Side(NamedTuple):
    """One way of generating tokens. With `one_at_a_time` it gets only the first of the prompts."""

    name: str
    way: Way
    one_at_a_time: bool = False

    async def measure(self, ask: Ask) -> "Speed":
        ask = Ask(ask.prompts[:1], ask.tokens) if self.one_at_a_time else ask
        took = await self.way(ask)
        return Speed(
            prompt=sum(map(len, ask.prompts)) / took.prompt_s,
            decode=took.decoded / took.decode_s,
            whole=len(ask.prompts) * ask.tokens / took.whole_s,
            cpu_ms=took.cpu_s / took.decoded * 1e3,
        )


class Speed(NamedTuple):
    """Speeds in tokens per second, and CPU time."""

    prompt: float
    """Prompt tokens per second, until the last prompt has its first token."""
    decode: float
    """Speed while all streams decode."""
    whole: float
    """Generated tokens per second, from the request to the last token."""
    cpu_ms: float
    """CPU milliseconds per decoded token, in the process that computes."""


class Pair(NamedTuple):
    theirs: Speed
    ours: Speed


class _Marks:
    """The engine's CPU time when the last stream got its first token and when the first stream got its last."""

    def __init__(self, engine_pid: int, ask: Ask) -> None:
        self.begun = self.ended = 0.0
        self._pid = engine_pid
        self._ask = ask
        self._started = 0

    def of_stream(self) -> Callable[[], None]:
        """Notes the time; called after each token of a stream."""
        places = itertools.count(1)

        def on_token() -> None:
            place = next(places)
            self._started += place == 1
            if place == 1 and self._started == len(self._ask.prompts):
                self.begun = system.cpu_seconds(self._pid)
            if place == self._ask.tokens and not self.ended:
                self.ended = system.cpu_seconds(self._pid)

        return on_token


async def of_system(client: Client, engine_pid: int, ask: Ask) -> Timing:
    """Measures the whole system. Streams begin and end one after another; only the time when all decode counts."""
    marks = _Marks(engine_pid, ask)
    asked = time.perf_counter()
    times = await asyncio.gather(
        *(streams.complete(client, prompt, ask.tokens, marks.of_stream()) for prompt in ask.prompts)
    )
    begun, ended = max(one[0] for one in times), min(one[-1] for one in times)
    decoded = sum(begun < at <= ended for one in times for at in one)
    if not decoded:
        raise SystemExit("the first stream ended before the last began: pass more --tokens, or a shorter --prompt")
    return Timing(
        prompt_s=begun - asked,
        decode_s=ended - begun,
        cpu_s=marks.ended - marks.begun,
        decoded=decoded,
        whole_s=max(one[-1] for one in times) - asked,
    )


@contextlib.asynccontextmanager
async def our_system(name: str, model: Path, *settings: str) -> AsyncIterator[Side]:
    async with system.running(model, *settings, "--context-length", str(CONTEXT)) as client:
        pid = (await system.card(client)).pids.engine
        yield Side(name, lambda ask: of_system(client, pid, ask))


@contextlib.contextmanager
def child_of(module: str, name: str, one_at_a_time: bool, model: Path, threads: int) -> Iterator[Side]:
    child = Child(module, model, threads, CONTEXT)
    try:
        yield Side(name, lambda ask: asyncio.to_thread(child.generate, ask), one_at_a_time)
    finally:
        child.close()


async def pairs_of(theirs: Side, ours: Side, sizes: "Sizes", count: int, rng: random.Random) -> list[Pair]:
    """Returns `count` measured pairs, after one that is not counted. Every pair has new prompts."""
    seen = []
    for _ in range(count + 1):
        prompts = [
            [rng.randrange(10, benchmark_model.VOCABULARY) for _ in range(sizes.prompt)] for _ in range(sizes.streams)
        ]
        ask = Ask(prompts, sizes.tokens)
        seen.append(Pair(await theirs.measure(ask), await ours.measure(ask)))
    return seen[1:]


class Sizes(NamedTuple):
    """The sizes of the requests to both sides."""

    streams: int
    prompt: int
    tokens: int


def show(theirs: str, ours: str, seen: list[Pair], sizes: Sizes, aim: str) -> None:
    print(f"\n{sizes.streams} streams of {sizes.tokens} tokens behind {sizes.prompt}, {len(seen)} interleaved pairs")
    print(f"  {'tokens/s':<36} {'prompt':>8} {'decode':>8} {'whole':>8} {'CPU ms/token':>14}")
    for name, column in ((theirs, [pair.theirs for pair in seen]), (ours, [pair.ours for pair in seen])):
        prompt, decode, whole, cpu_ms = (statistics.median(values) for values in zip(*column, strict=True))
        print(f"  {name:<36} {prompt:8.1f} {decode:8.1f} {whole:8.1f} {cpu_ms:14.1f}")
    print(f"  decode, ours / theirs       {quartiles([pair.ours.decode / pair.theirs.decode for pair in seen])}{aim}")
    print(f"  prompt, ours / theirs       {quartiles([pair.ours.prompt / pair.theirs.prompt for pair in seen])}")
    print(f"  whole, ours / theirs        {quartiles([pair.ours.whole / pair.theirs.whole for pair in seen])}")
    print(f"  CPU, theirs / ours          {quartiles([pair.theirs.cpu_ms / pair.ours.cpu_ms for pair in seen])}")


@contextlib.asynccontextmanager
async def started(options: argparse.Namespace, model: Path, gguf: Path | None) -> AsyncIterator[tuple[Side, Side]]:
    """Starts both sides; yields theirs and ours."""
    threads = ("--threads", str(options.threads), "--max-num-seqs", str(_ROWS))
    async with contextlib.AsyncExitStack() as stack:
        onnx = ("--engine", "onnx", "--provider", "cpu")
        ours = await stack.enter_async_context(our_system("tokenbus, ONNX engine", model, *threads, *onnx))
        if gguf is not None:
            memory = ("--engine", "gguf", "--kv-tokens", str(_ROWS * CONTEXT))
            theirs = await stack.enter_async_context(our_system(f"tokenbus, {gguf.name}", gguf, *threads, *memory))
        else:
            theirs = stack.enter_context(child_of(*_ALTERNATIVES[options.question], model, options.threads))
        yield theirs, ours


async def measure(options: argparse.Namespace, model: Path, gguf: Path | None) -> None:
    print(f"{model.name}, {options.threads} threads, {options.starts} starts", flush=True)
    aims = _AIMS[options.question]
    seen: dict[int, list[Pair]] = {count: [] for count in aims}
    rng = random.Random(options.seed)
    for start in range(options.starts):
        async with started(options, model, gguf) as (theirs, ours):
            for count in aims:
                sizes = Sizes(count, options.prompt, options.tokens)
                share = len(range(start, options.pairs, options.starts))
                seen[count] += await pairs_of(theirs, ours, sizes, share, rng)
    for count, aim in aims.items():
        show(theirs.name, ours.name, seen[count], Sizes(count, options.prompt, options.tokens), aim)


def main() -> None:
    parser = flags.parser(__doc__, prompt=64, tokens=64, pairs=9, threads=1, seed=0)
    parser.add_argument("question", choices=_AIMS)
    parser.add_argument("--model", type=Path, help="an ONNX folder")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--starts", type=int, default=3, help="of both ways, which share the pairs")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(benchmark_model.onnx_model(options.model))
        gguf = stack.enter_context(benchmark_model.same_in_gguf(options.gguf)) if options.question == "gguf" else None
        asyncio.run(measure(options, model, gguf))


if __name__ == "__main__":
    main()
